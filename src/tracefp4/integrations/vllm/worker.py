"""What the plugin adds to vLLM's worker: a recorder on every forward pass, and proofs of the weights.

vLLM mixes a class named by ``worker_extension_cls`` into its worker; the methods here are called on it by name, through
``collective_rpc``. :meth:`TraceWorker.tracefp4_attach` comes first, once, before anything is generated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tracefp4.core import KV_KINDS
from tracefp4.errors import EngineError
from tracefp4.integrations.engines.settings import EngineSettings
from tracefp4.integrations.engines.sites import check_plan
from tracefp4.integrations.engines.weights import Served
from tracefp4.integrations.engines.wire import SiteLine
from tracefp4.integrations.vllm.attach import SAID, make_session, told_settings
from tracefp4.integrations.vllm.experts import WEIGHTS, layer_of
from tracefp4.integrations.vllm.native import cache_type, observed, running_path, site_table
from tracefp4.integrations.vllm.own_pages import check_own_pages
from tracefp4.integrations.vllm.pages import attention_layers, has_pages
from tracefp4.integrations.vllm.rewind import mark_generators
from tracefp4.integrations.vllm.session import Session, install, installed, session
from tracefp4.integrations.vllm.stored import stored_experts
from tracefp4.rollout.admission import recorded_shapes


class TraceWorker:
    """Mixed into vLLM's worker, whose attributes it uses."""

    model_runner: Any
    vllm_config: Any
    device: Any

    def tracefp4_attach(self) -> dict[str, Any]:
        """Build the recorder for this worker's KV cache and watch the model's forwards.

        Returns:
            Sizes and versions, for people.

        Raises:
            EngineError: the model was not loaded with our quantization method, or cannot be recorded.
        """
        from vllm._version import __version__

        told, cache = told_settings(self.vllm_config), self.vllm_config.cache_config
        if told is None:
            raise EngineError(
                "the model was not loaded with quantization 'tracefp4', and no settings say that it is watched; see "
                "docs/vllm.md"
            )
        found, slots = installed(), self.model_runner.kv_cache_config.num_blocks * cache.block_size
        if found is None:
            # With the side channel, vLLM's output worker has made it already.
            sizes = {"slots": slots, "block_size": cache.block_size, "device": torch.device(self.device)}
            found = make_session(told, self.vllm_config, "connector", **sizes)
        model: nn.Module = self.model_runner.get_model()
        found.experts = _experts(model)
        found.sites = self._sites(told, found, model)
        check_plan(told.plan, found.sites, observed=not told.emulate)
        self._check_cache(told, found)
        self.tracefp4_hooks = _watch(model, found, self.model_runner)
        return {
            "vllm": __version__,
            "attention": type(_attention(self.model_runner)).__name__,
            "slots": slots,
            "block_size": cache.block_size,
            "carried": found.carried,
            "recorder_bytes": found.recorder.nbytes,
        }

    def _sites(self, told: EngineSettings, found: Session, model: nn.Module) -> list[SiteLine]:
        """The capability table of what runs."""
        layers = attention_layers(self.vllm_config)
        if not told.emulate:
            methods = [method for _, method in _experts_modules(model).values()]
            return observed(running_path(methods[0]) if methods else "", cache_type(layers))
        paged = any(map(has_pages, layers.values()))
        return site_table(told.spec, told.plan, found.recorder.device.type, SAID[found.carried], paged=paged)

    def _check_cache(self, told: EngineSettings, found: Session) -> None:
        """Refuse pages of vLLM's own that a plan with K or V cannot be read from."""
        layout = found.names.layout
        shapes = recorded_shapes(layout, told.spec, told.plan)
        wanted = sorted({shape.site.layer for shape in shapes if shape.site.kind in KV_KINDS})
        if not told.emulate and wanted and told.spec.kv is not None:
            check_own_pages(attention_layers(self.vllm_config), wanted, told.spec.kv, layout.kv_heads)

    def tracefp4_digest(self) -> str:
        """Checksum of the served weights; the trainer's :func:`~tracefp4.models.packing.model_digest` is equal."""
        model: nn.Module = self.model_runner.get_model()
        parameters = {name: p.data for name, p in model.named_parameters()}
        # A bias that vLLM widened for its kernel holds the same numbers.
        dtype = self.vllm_config.model_config.dtype
        parameters = {n: p.to(dtype) if n.endswith(".bias") else p for n, p in parameters.items()}
        names, spec, packed, stacked = session().names, session().recorder.spec, session().packed(), {}
        for layer, (module, method) in _experts_modules(model).items():
            kept = stored_experts(module, method)
            for name, weight in kept.items():
                packed[layer, name] = names.packed(layer, name, weight, spec)
            if not kept:
                stacked |= {(layer, name): weight for name, weight in _loaded(module).items()}
        return Served(names, parameters, packed, stacked).digest()

    def tracefp4_detach(self) -> None:
        """Undo :meth:`tracefp4_attach`."""
        for handle in getattr(self, "tracefp4_hooks", ()):
            handle.remove()
        session().store.close()
        install(None)


def _experts_modules(model: nn.Module) -> dict[int, tuple[nn.Module, Any]]:
    """Experts modules by decoder layer, with their methods."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    return {layer_of(m): (m, m.quant_method) for m in model.modules() if isinstance(m, RoutedExperts)}


def _experts(model: nn.Module) -> dict[int, Any]:
    return {layer: getattr(method, "experts", None) for layer, (_, method) in _experts_modules(model).items()}


def _loaded(module: nn.Module) -> dict[str, Tensor]:
    """Loaded expert weights by projection."""
    kept = getattr(module, "tracefp4_loaded", {})
    return {ours: kept.get(theirs, getattr(module, theirs)).data for ours, theirs in WEIGHTS.items()}


def _attention(runner: Any) -> Any:
    layers = runner.compilation_config.static_forward_context.values()
    return next((layer.impl for layer in layers if hasattr(layer, "impl")), None)


def _watch(model: nn.Module, found: Session, runner: Any) -> list[Any]:
    """Tell the recorder of every forward pass. The hooks run inside vLLM's forward context."""
    from vllm.forward_context import get_forward_context

    recorder = found.recorder
    cpu = recorder.device.type == "cpu"

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mappings: Any = get_forward_context().slot_mapping
        if not mappings:
            return  # A profiling run, which writes no KV.
        positions, tokens, cached = kwargs["positions"], kwargs["input_ids"], next(iter(mappings.values()))
        # The channel's rows are in the order of the batch; vLLM's snapshot takes as many as are real.
        lines = torch.arange(positions.shape[0], device=recorder.device)
        slots = lines if found.carried == "rows" else cached
        count = slots.numel()
        recorder.begin(slots, positions[:count], tokens[:count], cached)
        if cpu:
            mark_generators(runner)

    def after(_: nn.Module, args: Any, output: Any) -> None:
        if found.carried != "rows":
            recorder.keep(recorder.end())

    return [
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, always_call=True),
    ]
