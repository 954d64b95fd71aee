"""The coverage table of an external engine: what its plugin bound, under the trainer's names of modules.

The plugin reports each tensor that it meets, with the numerics it applies there and how often it was met. Here the
report becomes the same table that the trainer makes of itself, so that the two are compared line by line. A tensor that
the spec quantizes and the plugin did not report stands in the table as bf16, and the comparison names it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from tracefp4.core import EXPERT_KINDS, KV_KINDS, Kind
from tracefp4.formats.spec import Spec
from tracefp4.integrations.engines.recorder import Recorder
from tracefp4.integrations.engines.weights import Names
from tracefp4.models.coverage import BF16, Coverage, Row

Format = tuple[int, str, str, str, int]
"""Layer, kind, name and hash of the numerics (empty: none), and calls."""


def reported_formats(recorder: Recorder, packed: Iterable[tuple[int, str]], observed: Iterable[int]) -> list[Format]:
    """What a plugin that emulates has bound.

    Args:
        recorder: of the process that runs the model.
        packed: layer and projection of every expert weight that was really packed.
        observed: layers whose experts hand their inputs to the recorder.
    """
    spec, found = recorder.spec, list[Format]()

    def add(layer: int, kind: str, calls: int = 0) -> None:
        numerics = {"gate_up": spec.weights, "down": spec.weights, "routes": None}.get(kind)
        if kind in tuple(Kind):
            numerics = spec.for_kind(Kind(kind))
        if numerics is not None or kind == "routes":
            name, digest = ("", "") if numerics is None else (numerics.name, numerics.hash)
            found.append((layer, kind, name, digest, calls))

    for layer, projection in packed:
        add(layer, projection.removesuffix("_proj"))
    for layer in observed:
        for kind in EXPERT_KINDS:
            add(layer, str(kind), recorder.calls.get(f"{layer}.{kind}", 0))
        add(layer, "routes", recorder.calls.get(f"{layer}.routes", 0))
    if recorder.pool is not None:
        for layer in recorder.layout.kv_layers:
            for kind in (Kind.K, Kind.V):
                add(layer, str(kind), recorder.calls.get(f"{layer}.{Kind.K}", 0))
    return found


def engine_coverage(names: Names, spec: Spec, formats: Iterable[Format]) -> Coverage:
    """The table of what an engine quantizes, in the order and under the names of the trainer's own."""
    layout = names.layout
    known = {(layer, kind): (name, digest, calls) for layer, kind, name, digest, calls in formats}
    shapes = {shape.site: shape for shape in layout.site_shapes(spec)}
    rows: list[Row] = []

    def add(module: str, layer: int, kind: str, values: int) -> None:
        name, digest, calls = known.get((layer, kind), (BF16, "", 0))
        rows.append(Row(module, layer, kind, name or BF16, digest, values, calls or None))

    for layer in range(layout.num_layers):
        for site, shape in shapes.items():
            if site.layer == layer and site.kind in KV_KINDS:
                add(layout.attentions[layer], layer, str(site.kind), shape.values)
        if layer not in layout.experts:
            continue
        module = layout.experts[layer]
        add(layout.routers[layer], layer, "routes", layout.top_k)
        for projection in ("gate_up", "down"):
            add(module, layer, projection, math.prod(names.parameters[f"{module}.{projection}_proj"]))
        add(module, layer, str(Kind.EXPERTS_IN), layout.hidden)
        add(module, layer, str(Kind.EXPERTS_MID), layout.top_k * layout.intermediate)
    return Coverage(spec.name, tuple(rows), sum(math.prod(shape) for shape in names.parameters.values()))
