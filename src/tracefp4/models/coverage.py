"""What is quantized, with what, and whether the forward pass really goes there.

Quantizers miss modules silently: a tool that replaces linear layers finds no expert in a model whose experts are
stacked parameters, and the trainer then runs in BF16 what the rollout runs in FP4. So each side lists what its spec
quantizes, looks at a forward pass, and the two lists are compared before the first step::

    with probe(model) as calls:          # site objects are watched for the length of the block
        model(tokens)
    table = coverage(model, spec, calls) # raises if a module was missed or left in BF16
    compare(rollout_table, trainer_table)

Without ``calls`` the table says what is bound, not what was reached. A replayed CUDA graph runs no Python: probe before
it is captured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tracefp4.core import Kind, Site
from tracefp4.errors import CoverageError
from tracefp4.models.binding import Binding, binding_of
from tracefp4.models.experts import NAME
from tracefp4.models.layout import ModelLayout
from tracefp4.models.sites import Operand

if TYPE_CHECKING:
    from tracefp4.formats.numerics import Numerics
    from tracefp4.formats.spec import Spec

BF16 = "bf16"
_METHODS = {
    "gate_up": "gate_up",
    "down": "down",
    Kind.EXPERTS_IN: "enter",
    Kind.EXPERTS_MID: "middle",
    Kind.K: "attend",
    Kind.V: "attend",
    Kind.LATENT: "latent",
    "routes": "route",
}
"""Which method of a site object each kind of tensor passes through."""


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor of one module."""

    module: str
    """Path of the module."""
    layer: int
    kind: str
    """``gate_up`` and ``down`` for weights, ``routes``, or a :class:`~tracefp4.core.Kind`."""
    format: str
    """Name of the numerics, or ``bf16``."""
    numerics: str
    """Hash of the numerics; empty for ``bf16``."""
    values: int
    """Parameters of a weight; values a token of an activation."""
    calls: int | None = None
    """How often a probed forward passed here; ``None`` without a probe."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """What one side quantizes."""

    spec: str
    rows: tuple[Row, ...]
    parameters: int
    """Parameters of the whole model."""

    @property
    def quantized_parameters(self) -> int:
        """Parameters that a format stores."""
        return sum(row.values for row in self.rows if row.kind in ("gate_up", "down") and row.format != BF16)


@dataclass(slots=True)
class Calls:
    """What :func:`probe` saw: counts and the last operand, by module path and method."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    seen: dict[tuple[str, str], Tensor] = field(default_factory=dict)


class _Watched:
    """A site object that is being watched; everything else passes through."""

    def __init__(self, site: object, name: str, calls: Calls) -> None:
        self._site, self._name, self._calls = site, name, calls

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(self._site, attribute)
        if attribute not in _METHODS.values():
            return value
        return self._counted(attribute, value)

    def _counted(self, method: str, function: Callable[..., Any]) -> Callable[..., Any]:
        key = self._name, method

        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self._calls.counts[key] += 1
            if isinstance(result, Operand):
                self._calls.seen[key] = _sample(result.values)
            elif method == "latent":
                self._calls.seen[key] = _sample(result)
            return result

        return call


def _sample(values: Tensor, rows: int = 64) -> Tensor:
    """Some rows of an operand: enough to see whether it is quantized."""
    return values.detach().reshape(-1, values.shape[-1])[:rows].clone()


@contextmanager
def probe(model: nn.Module) -> Iterator[Calls]:
    """Watch the site objects of ``model`` for the length of a ``with`` block, in which it should run once.

    Raises:
        CoverageError: nothing is bound.
    """
    binding = _binding(model)
    calls = Calls()
    names = {id(module): name for name, module in model.named_modules()}
    sites = [(module, getattr(module, NAME)) for module in binding.modules]
    for module, site in sites:
        object.__setattr__(module, NAME, _Watched(site, names[id(module)], calls))
    try:
        yield calls
    finally:
        for module, site in sites:
            object.__setattr__(module, NAME, site)


def coverage(model: nn.Module, spec: Spec, calls: Calls | None = None) -> Coverage:
    """List what ``spec`` quantizes in a bound model, and check that it does.

    Args:
        model: a bound model.
        spec: how it is deployed.
        calls: from :func:`probe` around a forward pass; checks that the forward went through every site, and that the
            operands it got there lie on the grid of their format.

    Raises:
        CoverageError: nothing is bound; a module lost its site object or its implementation; with ``calls``, a module
            that was not reached or was left unquantized. The message names them.
        ModelError: the model has no module that the spec quantizes.
        FormatError: a width that a format cannot cut into blocks.
    """
    binding = _binding(model)
    rows = tuple(_rows(model, binding.layout, spec, calls))
    _check_bound(model, binding)
    if calls is not None:
        _check_reached(rows, spec, calls)
    return Coverage(spec.name, rows, sum(p.numel() for p in model.parameters()))


def compare(rollout: Coverage, trainer: Coverage) -> None:
    """Check that both sides quantize the same tensors with the same numerics.

    Raises:
        CoverageError: they differ; the message names the modules.
    """
    ours, theirs = (
        {f"{row.module} ({row.kind})": f"{row.format} {row.numerics}".strip() for row in side.rows}
        for side in (rollout, trainer)
    )
    faults = []
    for name in sorted(ours.keys() | theirs.keys()):
        left, right = ours.get(name, "absent"), theirs.get(name, "absent")
        if left != right:
            faults.append(f"{name}: rollout {left}, trainer {right}")
    _fail("rollout and trainer quantize differently", faults)


def render(table: Coverage) -> str:
    """Return the table as plain text, with equal layers in one line."""
    header = ("layers", "module", "tensor", "format", "values", "calls")
    lines: list[tuple[str, ...]] = [header]
    keyed = sorted(table.rows, key=_group)
    for key, group in groupby(keyed, key=_group):
        rows = list(group)
        counts = {row.calls for row in rows}
        calls = "-" if counts == {None} else "/".join(map(str, sorted(counts, key=lambda c: c or 0)))
        lines.append((_ranges(row.layer for row in rows), key[0], key[1], key[2], str(key[3]), calls))
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    share = table.quantized_parameters / max(table.parameters, 1)
    text.append(
        f"spec {table.spec}: {share:.1%} of {table.parameters:,} parameters quantized; what is not listed stays in bf16"
    )
    return "\n".join(text)


def _group(row: Row) -> tuple[str, str, str, int]:
    module = row.module.replace(f".{row.layer}.", ".*.", 1)
    return module, row.kind, row.format, row.values


def _ranges(layers: Iterable[int]) -> str:
    """``0-3,5`` for 0, 1, 2, 3, 5."""
    parts: list[list[int]] = []
    for layer in sorted(layers):
        if parts and layer == parts[-1][1] + 1:
            parts[-1][1] = layer
        else:
            parts.append([layer, layer])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _binding(model: nn.Module) -> Binding:
    binding = binding_of(model)
    if binding is None:
        raise CoverageError(f"{type(model).__name__} has no site objects bound; call bind(model, sites) first")
    return binding


def _rows(model: nn.Module, layout: ModelLayout, spec: Spec, calls: Calls | None) -> Iterator[Row]:
    shapes = {shape.site: shape for shape in layout.site_shapes(spec)}

    def row(module: str, layer: int, kind: str, numerics: Numerics | None, values: int) -> Row:
        count = None if calls is None else calls.counts[module, _METHODS[kind]]
        named = (BF16, "") if numerics is None else (numerics.name, numerics.hash)
        return Row(module, layer, str(kind), *named, values, count)

    for layer in range(layout.num_layers):
        for site, shape in shapes.items():
            if site.layer == layer and site.kind in (Kind.K, Kind.V, Kind.LATENT):
                yield row(layout.attentions[layer], layer, site.kind, spec.kv, shape.values)
        if layer not in layout.experts:
            continue
        name = layout.experts[layer]
        module: Any = model.get_submodule(name)
        yield row(layout.routers[layer], layer, "routes", None, layout.top_k)
        yield row(name, layer, "gate_up", spec.weights_of(layer), module.gate_up_proj.numel())
        yield row(name, layer, "down", spec.weights_of(layer), module.down_proj.numel())
        for kind, values in ((Kind.EXPERTS_IN, layout.hidden), (Kind.EXPERTS_MID, layout.top_k * layout.intermediate)):
            yield row(name, layer, kind, spec.for_site(Site(layer, kind)), values)


def _check_bound(model: nn.Module, binding: Binding) -> None:
    """Someone may have set another implementation since."""
    layout = binding.layout
    faults = []
    for names, attribute in ((layout.experts, "_experts_implementation"), (layout.attentions, "_attn_implementation")):
        for name in names.values():
            module: Any = model.get_submodule(name)
            implementation = getattr(module.config, attribute)
            if implementation != NAME:
                faults.append(f"{name} uses the implementation {implementation!r}")
            if not hasattr(module, NAME):
                faults.append(f"{name} has no site object")
    _fail("modules are not bound", faults)


def _check_reached(rows: Iterable[Row], spec: Spec, calls: Calls) -> None:
    rows = list(rows)
    _fail("the forward pass did not reach", [f"{row.module} ({row.kind})" for row in rows if not row.calls])
    faults = []
    for row in rows:
        numerics = spec.weights_of(row.layer) if row.kind in ("gate_up", "down") else None
        if row.kind in tuple(Kind):
            numerics = spec.for_site(Site(row.layer, Kind(row.kind)))
        values = calls.seen.get((row.module, _METHODS[row.kind]))
        if numerics is not None and values is not None and not _on_grid(values, numerics):
            faults.append(f"{row.module} ({row.kind}): not {numerics.name}")
    _fail("left unquantized", faults)


def _on_grid(values: Tensor, numerics: Numerics) -> bool:
    """Whether no block has more distinct magnitudes than E2M1, which has 8. Wider elements are not judged."""
    if numerics.element != "e2m1":
        return True
    blocks = values.float().abs().reshape(-1, numerics.block).sort(-1).values
    distinct = 1 + (blocks[:, 1:] != blocks[:, :-1]).sum(-1)
    return bool((distinct <= 8).all()) or not bool(torch.isfinite(blocks).all())


def _fail(what: str, faults: list[str]) -> None:
    if not faults:
        return
    shown = "; ".join(faults[:4])
    more = f"; and {len(faults) - 4} more" if len(faults) > 4 else ""
    raise CoverageError(f"{what}: {shown}{more}")
