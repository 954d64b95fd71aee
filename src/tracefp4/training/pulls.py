"""Checks instead of bits: what the trainer finds by itself is not sent.

A trainer that was guided at every site before this one computes nearly the rollout's values. Rounded to nearest at the
rollout's scales they mostly have the recorded low bits already. So a *checked* plan (``c1`` for ``r1``) sends the block
scales and, for each token and site, 32 bits over the low bits of all codes there; the bits stay with the engine::

    scales    restored as ever
    codes     the nearest ones at these scales, and their low bits
    check     of these bits: equal to the one that was sent?
        yes   they are the recorded bits (others pass with a probability of at most 2^-31)
        no    the recorded bits of this token at this site are pulled from the engine, and must pass

Then the site's bits are known, all of them recorded ones, and it is *settled*: from here on it is like one whose bits
came with the frame, and so is every result. A site settles when the first forward reaches it, because its check needs
the guided results of those before, and stays so for as long as the micro-batch lives: what a layer computes again for
its backward pass is the same.

To learn which checks failed, the host waits for the device once at every such site. What was pulled goes there in one
copy, and its checks are computed there. What they say is read when the host waits the next time, and at the end of the
micro-batch (:meth:`Pulls.confirm`): before anybody has a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

import numpy as np
import torch
from torch import Tensor

from tracefp4.core import Site
from tracefp4.errors import GuidanceCorrupt, GuidanceMissing
from tracefp4.formats.numerics import Numerics
from tracefp4.guidance.codec import code_checks
from tracefp4.guidance.record import SiteRecord
from tracefp4.guidance.rounding import nearest_planes
from tracefp4.guidance.store import Source, pull_from
from tracefp4.training.ranks import ALONE, Ranks


@dataclass(slots=True)
class PullCounts:
    """Vectors of tokens at checked sites, and those whose bits were pulled."""

    vectors: int = 0
    pulled: int = 0
    pulled_bytes: int = 0

    @property
    def share(self) -> float:
        """Share of the vectors that were pulled."""
        return self.pulled / max(self.vectors, 1)

    def take(self, ranks: Ranks = ALONE) -> PullCounts | None:
        """Counts of all ranks since the last call, ``None`` if no site was checked. Collective."""
        found = PullCounts(*map(int, ranks.sum([float(count) for count in astuple(self)])))
        self.vectors = self.pulled = self.pulled_bytes = 0
        return found if found.vectors else None


@dataclass(frozen=True, slots=True)
class _Verdict:
    """How bits that were pulled for a site did."""

    site: Site
    wrong: Tensor
    """int64 scalar on the host: the first row whose bits do not pass, or the number of rows if all do."""
    arrival: torch.Event | None
    """What a host must wait for before it reads it."""


@dataclass(slots=True)
class Pulls:
    """Settles the checked sites of one micro-batch of ``B`` sequences, padded to ``S`` rows."""

    bits: int
    """Low bits of each code that checks are made of."""
    sources: Sequence[Source | None]
    """Who has the bits of each sequence."""
    width: int
    """``S``."""
    rows: int
    """Rows that have guidance."""
    _verdicts: list[_Verdict] = field(default_factory=list)

    def settle(
        self,
        x: Tensor,
        record: SiteRecord,
        numerics: Numerics,
        guided: Tensor,
        rows: Tensor | None,
        counts: PullCounts,
    ) -> None:
        """Find the bits of a site, unless they are known; ``record`` has them then, and zeros in rows without guidance.

        Args:
            x: ``(B * S * vectors, width)``, the trainer's values.
            record: the site's, of ``B * S`` rows, without bits. Its planes are set.
            numerics: the site's.
            guided: bool ``(B * S,)``: the row has guidance.
            rows: order of ``x`` if not row-major, as in ``TrainerSites.quantize``.
            counts: added to.

        Raises:
            GuidanceMissing: bits are needed, and there is nobody to ask.
            GuidanceCorrupt: what was pulled has another shape, or does not pass its check; see :meth:`confirm`.
        """
        checks = record.code_checks
        if checks is None or record.bits:
            return
        own = nearest_planes(x, record, numerics, rows, self.bits)
        if rows is not None:
            ordered = torch.empty_like(own)
            ordered[rows] = own
            own = ordered
        planes = own.view(len(guided), record.shape.vectors, -1) * guided[:, None, None]
        missed = (code_checks(planes.flatten(1)) != checks) & guided
        failed = np.flatnonzero(missed.cpu().numpy())
        self.confirm()  # all of it has arrived with what failed
        if len(failed):
            places, bits = self._pull(record, failed, planes.device)
            wrong = code_checks(bits.flatten(1)) != checks.index_select(0, places)
            self._note(record.shape.site, torch.where(wrong, places, len(guided)).amin())
            planes.index_copy_(0, places, bits)
            counts.pulled_bytes += bits.nbytes
        record.planes = planes
        counts.vectors += self.rows * record.shape.vectors
        counts.pulled += len(failed) * record.shape.vectors

    def confirm(self) -> None:
        """Read how everything did that was pulled. Results of the micro-batch must not be used before.

        Raises:
            GuidanceCorrupt: bits do not pass their checks. So will every later call.
        """
        for verdict in self._verdicts:
            if verdict.arrival is not None:
                verdict.arrival.synchronize()
            b = int(verdict.wrong) // self.width
            if b < len(self.sources):
                raise GuidanceCorrupt(
                    f"site {verdict.site}: bits that were pulled for sequence {b} do not pass their checks"
                )
        self._verdicts.clear()

    def _note(self, site: Site, wrong: Tensor) -> None:
        """Send a verdict to the host without waiting for it."""
        if wrong.device.type != "cuda":
            self._verdicts.append(_Verdict(site, wrong.cpu(), None))
            return
        there = wrong.to("cpu", non_blocking=True)  # pinned
        self._verdicts.append(_Verdict(site, there, torch.cuda.current_stream(wrong.device).record_event()))

    def _pull(self, record: SiteRecord, failed: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
        """Bits of rows ``failed`` int64 ``(n,)``, ascending, of the micro-batch.

        Returns:
            The rows and uint8 ``(n, vectors, bits * width / 8)``, on the device.
        """
        shape = record.shape
        rows = failed % self.width
        edges = np.searchsorted(failed, np.arange(len(self.sources) + 1) * self.width).tolist()
        wanted: list[tuple[Source, np.ndarray]] = []
        for b, source in enumerate(self.sources):
            if edges[b] == edges[b + 1]:
                continue
            if source is None:
                raise GuidanceMissing(
                    f"site {shape.site}: sequence {b} has checks of bits and nobody to pull the bits from"
                )
            wanted.append((source, rows[edges[b] : edges[b + 1]]))
        parts = pull_from(shape.site, wanted)
        size = (shape.vectors, self.bits * shape.width // 8)
        for (_, mine), part in zip(wanted, parts, strict=True):
            if part.dtype != np.uint8 or part.shape != (len(mine), *size):
                raise GuidanceCorrupt(
                    f"site {shape.site}: {part.dtype} {part.shape} was pulled, not uint8 {(len(mine), *size)}"
                )
        # The rows and their bits in one buffer, which crosses in one copy.
        first = failed.nbytes
        buffer = torch.empty(
            first + len(failed) * size[0] * size[1], dtype=torch.uint8, pin_memory=device.type == "cuda"
        )
        array = buffer.numpy()
        array[:first] = failed.view(np.uint8)
        np.concatenate(parts, out=array[first:].reshape(len(failed), *size))
        moved = buffer.to(device, non_blocking=True)
        return moved[:first].view(torch.int64), moved[first:].view(len(failed), *size)
