"""Binding site objects to a model, and taking them off again.

:func:`bind` hangs one object on every experts module, router and attention module, and points the configuration that
those modules read at our two functions. Modules are not wrapped: parameters, names and the state dict stay as
they are, so checkpoints, FSDP and gradient checkpointing see the same model. :func:`unbind` restores every setting.
An engine may also step gated delta nets by itself, and begin attention at the projections
(:mod:`tracefp4.models.heads`); the forward of those modules then asks its object first.

Site objects that *fuse*, a trainer's, also take over norms, rotary embedding and routers whose routes are known, which
do the same in fewer launches (:mod:`tracefp4.models.norms`, :mod:`tracefp4.models.rotary`,
:mod:`tracefp4.models.replay`).

The implementation is set on the configuration objects of the bound modules, not on the whole model: the vision encoder
of a composite model keeps its own attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from tracefp4.errors import ModelError
from tracefp4.models import attention, experts, heads, norms, replay, rotary
from tracefp4.models.delta import StepHook
from tracefp4.models.experts import NAME
from tracefp4.models.latent import hook_latent
from tracefp4.models.layout import ModelLayout, describe
from tracefp4.models.opaque import give_key, take_key
from tracefp4.models.routing import Removable, hook_router
from tracefp4.models.sites import ProjectingSite, SiteSet, SteppingSites

if TYPE_CHECKING:
    from tracefp4.formats.spec import Spec

_BINDING = "tracefp4_binding"


@dataclass(slots=True)
class Binding:
    """What :func:`bind` changed, so that :func:`unbind` can restore it."""

    layout: ModelLayout
    modules: list[nn.Module] = field(default_factory=list)
    handles: list[Removable] = field(default_factory=list)
    settings: list[tuple[Any, str, Any]] = field(default_factory=list)
    """``(configuration, attribute, value before)``."""


def binding_of(model: nn.Module) -> Binding | None:
    """Return the binding of ``model``, or ``None``."""
    return getattr(model, _BINDING, None)


def bind(model: nn.Module, sites: SiteSet, *, spec: Spec | None = None) -> ModelLayout:
    """Attach site objects to a transformers model.

    Args:
        model: a causal language model, on its device and in its dtype; wrap it for sharding afterwards.
        sites: the objects of one side; asked once for each layer that has experts or a KV cache.
        spec: if given, the model has to have every site that it quantizes, in widths that its formats can cut.

    Returns:
        The layout of the model.

    Raises:
        ModelError: already bound; hub kernels; a module that we cannot serve.
        FormatError: see :meth:`ModelLayout.site_shapes`.
    """
    layout = describe(model)
    _refuse(model, layout)
    if spec is not None:
        layout.site_shapes(spec)
    experts.register()
    attention.register()
    binding = Binding(layout)
    with ExitStack() as undo:
        undo.callback(_restore, binding)
        _attach(model, sites, binding)
        undo.pop_all()
    object.__setattr__(model, _BINDING, binding)
    return layout


def unbind(model: nn.Module) -> None:
    """Take all site objects off and restore the implementations that were set before.

    Raises:
        ModelError: nothing is bound.
    """
    binding = binding_of(model)
    if binding is None:
        raise ModelError(f"{type(model).__name__} has no site objects bound")
    _restore(binding)
    object.__delattr__(model, _BINDING)


@contextmanager
def bound(model: nn.Module, sites: SiteSet, *, spec: Spec | None = None) -> Iterator[ModelLayout]:
    """Bind for the length of a ``with`` block."""
    layout = bind(model, sites, spec=spec)
    try:
        yield layout
    finally:
        unbind(model)


def _refuse(model: nn.Module, layout: ModelLayout) -> None:
    if binding_of(model) is not None:
        raise ModelError(f"{type(model).__name__} already has site objects bound; call unbind(model) first")
    if getattr(model, "use_kernels", False):
        raise ModelError("the model runs hub kernels, which pass our functions by; load it with use_kernels=False")
    for name in layout.experts.values():
        experts.check_experts(model.get_submodule(name), name)
    for name in [*layout.experts.values(), *layout.attentions.values()]:
        module: Any = model.get_submodule(name)
        config = module.config
        if NAME in (config._attn_implementation, config._experts_implementation):
            raise ModelError(
                f"{name}: its configuration object is shared with a model that is already bound; "
                "build each model from a configuration of its own (copy.deepcopy(config))"
            )


def _attach(model: nn.Module, sites: SiteSet, binding: Binding) -> None:
    layout = binding.layout
    fuses = getattr(sites, "fuses", False)
    if fuses:
        _fuse(model, layout, binding)
    for layer, name in layout.experts.items():
        module: Any = model.get_submodule(name)
        router = model.get_submodule(layout.routers[layer])
        _hang(binding, module, sites.experts(layer))
        _set(binding, module.config, "_experts_implementation")
        _hang(binding, router, sites.router(layer))
        binding.handles.append(hook_router(router, layout.routers[layer]))
        choice = replay.plain(router, layout.routers[layer]) if fuses else None
        if choice is not None:
            binding.handles.append(replay.KnownRoutes(router, choice))
    for layer, name in layout.attentions.items():
        module: Any = model.get_submodule(name)
        _hang(binding, module, sites.attention(layer))
        _set(binding, module.config, "_attn_implementation")
        if layer in layout.latents:
            binding.handles.append(hook_latent(model.get_submodule(layout.latents[layer]), module))
        elif isinstance(getattr(module, NAME), ProjectingSite):
            handle = heads.hook(module, _angles(model.get_submodule(layout.decoder)))
            binding.handles += [] if handle is None else [handle]
    if isinstance(sites, SteppingSites):
        for layer, name in layout.deltas.items():
            module = model.get_submodule(name)
            _hang(binding, module, sites.delta(layer))
            binding.handles.append(StepHook(module))


def _angles(decoder: nn.Module) -> int | None:
    """Values of a head that a decoder's rotary embedding turns, if it says."""
    frequencies = getattr(getattr(decoder, "rotary_emb", None), "inv_freq", None)
    return None if frequencies is None else 2 * frequencies.shape[-1]


def _fuse(model: nn.Module, layout: ModelLayout, binding: Binding) -> None:
    """Norms and rotary embedding of the decoder in a launch each."""
    binding.handles += [norms.FusedNorm(m) for m in model.get_submodule(layout.decoder).modules() if norms.is_plain(m)]
    families = {type(m): m for m in (model.get_submodule(name) for name in layout.attentions.values())}
    binding.handles += [rotary.FusedRotary(m) for m in families.values() if rotary.is_plain(m)]


def _hang(binding: Binding, module: nn.Module, site: object) -> None:
    # Not nn.Module's own __setattr__: a site object that is itself a module must not enter the state dict.
    object.__setattr__(module, NAME, site)
    give_key(module)
    binding.modules.append(module)


def _set(binding: Binding, config: Any, attribute: str) -> None:
    before = getattr(config, attribute)
    if before == NAME:
        return
    binding.settings.append((config, attribute, before))
    setattr(config, attribute, NAME)


def _restore(binding: Binding) -> None:
    for handle in binding.handles:
        handle.remove()
    for module in binding.modules:
        if hasattr(module, NAME):
            object.__delattr__(module, NAME)
            take_key(module)
    for config, attribute, before in binding.settings:
        setattr(config, attribute, before)
