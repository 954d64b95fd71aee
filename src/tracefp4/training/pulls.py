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
its backward pass is the same. To learn whether a check failed, the host waits for the device at every such site.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import groupby

import torch
from torch import Tensor

from tracefp4.errors import GuidanceCorrupt, GuidanceMissing
from tracefp4.formats.numerics import Numerics
from tracefp4.guidance.codec import code_checks, pack_bits
from tracefp4.guidance.record import SiteRecord
from tracefp4.guidance.store import Pull
from tracefp4.quantizers.guided import nearest_codes
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


@dataclass(slots=True)
class Pulls:
    """Settles the checked sites of one micro-batch of ``B`` sequences, padded to ``S`` rows."""

    bits: int
    """Low bits of each code that checks are made of."""
    sources: Sequence[Pull | None]
    """Who has the bits of each sequence."""
    width: int
    """``S``."""
    rows: int
    """Rows that have guidance."""

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
            GuidanceCorrupt: what was pulled does not pass the check.
        """
        checks = record.code_checks
        if checks is None or record.bits:
            return
        own = pack_bits(nearest_codes(x, record.outcome(rows), numerics), self.bits)
        if rows is not None:
            ordered = torch.empty_like(own)
            ordered[rows] = own
            own = ordered
        planes = own.view(len(guided), record.shape.vectors, -1) * guided[:, None, None]
        failed: list[int] = ((code_checks(planes.flatten(1)) != checks) & guided).nonzero().flatten().tolist()
        for b, group in groupby(failed, key=lambda row: row // self.width):
            places = list(group)
            pulled = self._pull(b, record, [row % self.width for row in places], checks[places])
            planes[places] = pulled.to(planes.device)
            counts.pulled_bytes += pulled.nbytes
        record.planes = planes
        counts.vectors += self.rows * record.shape.vectors
        counts.pulled += len(failed) * record.shape.vectors

    def _pull(self, b: int, record: SiteRecord, rows: Sequence[int], checks: Tensor) -> Tensor:
        source, shape = self.sources[b], record.shape
        if source is None:
            raise GuidanceMissing(
                f"site {shape.site}: sequence {b} has checks of bits and nobody to pull the bits from"
            )
        bits = source(shape.site, rows)
        wanted = (len(rows), shape.vectors, self.bits * shape.width // 8)
        if bits.dtype != torch.uint8 or tuple(bits.shape) != wanted:
            raise GuidanceCorrupt(f"site {shape.site}: {bits.dtype} {tuple(bits.shape)} was pulled, not uint8 {wanted}")
        if not torch.equal(code_checks(bits.flatten(1)).cpu(), checks.cpu()):
            raise GuidanceCorrupt(f"site {shape.site}: bits that were pulled for sequence {b} do not pass their checks")
        return bits
