"""Plans ``auto:<bytes>`` of a measurement: chosen on prompts of their own, and how many layers are left in BF16.

A number of first layers in BF16 is another deployment, so rollouts to choose on are sampled for each that is tried, and
rollouts to measure on for the one that is chosen. Both are kept: other budgets ask for the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tracefp4.core import Request, Rollout
from tracefp4.evaluation.gauge import Gauge
from tracefp4.formats.spec import Spec, get_spec, with_bf16_layers
from tracefp4.guidance.auto import Choice, choose_depth
from tracefp4.guidance.record import Record
from tracefp4.rl.bf16_layers import priced, tried_depths

Sampled = tuple[list[Rollout], list[Record]]
"""Rollouts, and the whole codes of each."""

Sample = Callable[[Spec, Sequence[Request]], Sampled]
"""Samples requests under a spec."""


class Chooser:
    """Chooses plans for budgets, and hands out what they are measured on.

    Args:
        spec: name of the spec that is measured; one that names a number of layers in BF16 keeps it.
        numerics: its preset.
        engine: name of the rollout engine.
        gauge: of that spec; those of other specs are made from it.
        apart: requests to choose on.
        requests: requests to measure on.
        sample: samples them.
        known: rollouts under the spec as it is named, to choose on and to measure on.
        note: called with a sentence for each number of layers that was tried.
    """

    def __init__(
        self,
        spec: str,
        numerics: str,
        engine: str,
        gauge: Gauge,
        apart: Sequence[Request],
        requests: Sequence[Request],
        sample: Sample,
        known: tuple[Sampled, Sampled],
        note: Callable[[str], None],
    ) -> None:
        self._name, self._numerics, self._engine, self._note = spec, numerics, engine, note
        self._apart, self._requests, self._sample = apart, requests, sample
        self._gauges = {gauge.spec.bf16_layers: gauge}
        self._others = {gauge.spec.bf16_layers: known[0]}
        self._measured = {gauge.spec.bf16_layers: known[1]}
        self._plain = gauge

    def choose(self, budget: int) -> Choice:
        """The best plan of at most ``budget`` bytes a token, and the layers that it leaves in BF16."""
        layout, plain = self._plain.layout, self._plain.spec

        def choose(layers: int) -> Choice:
            gauge = self.gauge(layers)
            if layers not in self._others:
                self._others[layers] = self._sample(gauge.spec, self._apart)
            choice = gauge.choose(*self._others[layers], budget, self._engine == "embedded")
            self._note(f"auto:{budget}, {gauge.spec.name}: {priced(choice, layout, gauge.spec, plain)}")
            return choice

        return choose_depth(tried_depths(self._name, self._engine, layout.num_layers), choose)

    def gauge(self, layers: int) -> Gauge:
        """What scores rollouts of the spec with so many layers in BF16."""
        if layers not in self._gauges:
            spec = get_spec(with_bf16_layers(self._name, layers), self._numerics)
            self._gauges[layers] = self._plain.under(spec)
        return self._gauges[layers]

    def measured(self, layers: int) -> Sampled:
        """Rollouts to measure on."""
        if layers not in self._measured:
            self._measured[layers] = self._sample(self.gauge(layers).spec, self._requests)
        return self._measured[layers]
