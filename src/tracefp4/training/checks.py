"""Checking that congruent block scales were restored as the rollout had them.

A congruent scale travels as its low 2 or 3 bits; the trainer supplies the rest from its own block scale. Where the two
sides are too far apart the restored scale is wrong, and nothing in it shows that. So a checksum of the whole scale
bytes of each site and 16 tokens travels along. Failures are counted, not repaired: the rate tells whether a plan's
scales are safe on this model, and a rate that is not near zero means that they are not.

Comparing takes a GPU less time than launching it, so sites of a kind are compared several at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracefp4.guidance.codec import count_failures
from tracefp4.guidance.record import SiteRecord
from tracefp4.kernels.sizes import COMPARED_TOGETHER
from tracefp4.training.ranks import ALONE, Ranks


class ScaleChecks:
    """Counts chunks of 16 tokens, over all sites, and those whose restored scales fail their check."""

    def __init__(self) -> None:
        self._totals: Tensor | None = None
        self._waiting: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """Scales ``(B, T, n)`` and their recorded checks, by ``n``."""
        self._valid: Tensor | None = None
        """``(B, T)`` of those that wait."""

    def count(self, scales: Tensor, record: SiteRecord, guided: Tensor, rows: Tensor | None) -> None:
        """Check one site of one forward. Tensors are kept until they are compared, at the latest by :meth:`settle`.

        Args:
            scales: uint8 ``(R * vectors, blocks)``, restored.
            record: the site's stacked record; ``checks (B, chunks)``.
            guided: bool ``(R,)``, rows that have guidance.
            rows: order of ``scales`` if not row-major, as in ``TrainerSites.quantize``.
        """
        if record.checks is None:
            return
        if rows is not None:
            ordered = torch.empty_like(scales)
            ordered[rows] = scales
            scales = ordered
        valid = guided.view(record.checks.shape[0], -1)
        if self._valid is None or self._valid.data_ptr() != valid.data_ptr() or self._valid.shape != valid.shape:
            self.settle()
            self._valid = valid
        scales = scales.reshape(*valid.shape, -1)
        same = self._waiting.setdefault(scales.shape[-1], [])
        same.append((scales, record.checks))
        if len(same) == COMPARED_TOGETHER:
            self._compare(scales.shape[-1], valid)

    def _compare(self, width: int, valid: Tensor) -> None:
        """Compare what waits of this width."""
        if self._totals is None:
            self._totals = torch.zeros(2, dtype=torch.int64, device=valid.device)
        scales, checks = zip(*self._waiting.pop(width), strict=True)
        count_failures(self._totals, scales, valid, checks)

    def settle(self) -> None:
        """Compare what waits; nothing of a micro-batch is kept then."""
        if self._valid is not None:
            for width in tuple(self._waiting):
                self._compare(width, self._valid)
        self._valid = None

    def add(self, counts: Tensor) -> None:
        """Add what :meth:`total` returned elsewhere."""
        self.settle()
        self._totals = counts.clone() if self._totals is None else self._totals + counts

    def total(self) -> Tensor | None:
        """Chunks checked and chunks failed so far, int64 ``(2,)`` on the device; ``None`` if nothing was checked.

        Later counts are added in place.
        """
        self.settle()
        return self._totals

    def take(self, ranks: Ranks = ALONE) -> float | None:
        """Share of chunks that failed on any rank since the last call; ``None`` if none were checked.

        Reads the device, and is collective.
        """
        counts = self.total()
        mine = [0.0, 0.0] if counts is None else [float(count) for count in counts.tolist()]
        self._totals = None
        total, failed = ranks.sum(mine)
        return failed / total if total else None
