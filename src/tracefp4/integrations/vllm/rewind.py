"""Seeded sampling with chunked prefill on a CPU.

vLLM samples for every request of a batch and throws the sample of an unfinished prompt away; so that a seed means the
same tokens however a prompt is cut, it then sets the request's generator back by the draw it wasted::

    gen.set_offset(gen.get_offset() - 4)

Offsets belong to CUDA's counter-based generator. The CPU's Mersenne Twister has none, and the call raises "CPU
Generator does not use offset". A :class:`RewindingGenerator` answers it: it remembers its state before the draw and
goes back there.
"""

from __future__ import annotations

from typing import Any

import torch


class RewindingGenerator(torch.Generator):
    """A CPU generator that can take back what was drawn since :meth:`mark`."""

    _marked: torch.Tensor | None = None

    def mark(self) -> None:
        """Remember the present state."""
        self._marked = self.get_state()

    def get_offset(self) -> int:
        """An offset that only :meth:`set_offset` understands."""
        return 0

    def set_offset(self, offset: int) -> None:
        """Go back to the marked state, whatever the offset."""
        if self._marked is not None:
            self.set_state(self._marked)


def mark_generators(runner: Any) -> None:
    """Before a forward pass: make the generators of a CPU model runner rewindable, and mark those that will rewind.

    Args:
        runner: vLLM's V1 model runner, between preparing its inputs and sampling.
    """
    batch = runner.input_batch
    discarded = runner.discard_request_mask.np
    for index, generator in list(batch.generators.items()):
        if not isinstance(generator, RewindingGenerator):
            replacement = RewindingGenerator(device="cpu")
            replacement.set_state(generator.get_state())
            batch.generators[index] = generator = replacement
            runner.requests[batch.req_ids[index]].generator = replacement
        if discarded[index]:
            generator.mark()
