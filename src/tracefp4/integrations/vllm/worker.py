"""What the plugin adds to vLLM's worker: a recorder on every forward pass, and proofs of the weights.

vLLM mixes a class named by ``worker_extension_cls`` into its worker; the methods here are called on it by name, through
``collective_rpc``. :meth:`TraceWorker.tracefp4_attach` comes first, once, before anything is generated.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from tracefp4.errors import EngineError
from tracefp4.guidance.file_store import FileStore
from tracefp4.integrations.engines.recorder import Recorder
from tracefp4.integrations.engines.weights import Names, Served, skeleton
from tracefp4.integrations.vllm.arguments import check_layout
from tracefp4.integrations.vllm.experts import WEIGHTS, EmulatedMethod, PlainMethod, layer_of
from tracefp4.integrations.vllm.quantization import TraceConfig
from tracefp4.integrations.vllm.rewind import mark_generators
from tracefp4.integrations.vllm.session import Session, install, session


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

        config = self.vllm_config.quant_config
        if not isinstance(config, TraceConfig):
            raise EngineError("the model was not loaded with quantization 'tracefp4'; see docs/vllm.md")
        told, cache = config.settings, self.vllm_config.cache_config
        names = Names(skeleton(told.model))
        check_layout(names.layout)
        store = FileStore(told.folder)
        slots = self.model_runner.kv_cache_config.num_blocks * cache.block_size
        recorder = Recorder(
            names.layout,
            told.spec,
            told.plan,
            store,
            slots=slots,
            step_tokens=self.vllm_config.scheduler_config.max_num_batched_tokens,
            dtype=self.vllm_config.model_config.dtype,
            device=self.device,
        )
        model: nn.Module = self.model_runner.get_model()
        install(Session(recorder, store, cache.block_size, _experts(model)))
        self.tracefp4_names = names
        self.tracefp4_hooks = _watch(model, recorder, self.model_runner)
        return {
            "vllm": __version__,
            "attention": type(_attention(self.model_runner)).__name__,
            "slots": slots,
            "block_size": cache.block_size,
            "recorder_bytes": recorder.nbytes,
        }

    def tracefp4_digest(self) -> str:
        """Checksum of the served weights; the trainer's :func:`~tracefp4.models.packing.model_digest` is equal."""
        model: nn.Module = self.model_runner.get_model()
        parameters = {name: p.data for name, p in model.named_parameters()}
        # A bias that vLLM widened for its kernel holds the same numbers.
        dtype = self.vllm_config.model_config.dtype
        parameters = {n: p.to(dtype) if n.endswith(".bias") else p for n, p in parameters.items()}
        return Served(self.tracefp4_names, parameters, session().packed(), _stacked(model)).digest()

    def tracefp4_detach(self) -> None:
        """Undo :meth:`tracefp4_attach`."""
        for handle in getattr(self, "tracefp4_hooks", ()):
            handle.remove()
        session().store.close()
        install(None)


def _methods(model: nn.Module) -> dict[int, tuple[nn.Module, EmulatedMethod | PlainMethod]]:
    """Experts modules by decoder layer, with their methods."""
    found = {}
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, EmulatedMethod | PlainMethod):
            found[layer_of(module)] = module, method
    return found


def _experts(model: nn.Module) -> dict[int, Any]:
    return {layer: getattr(method, "experts", None) for layer, (_, method) in _methods(model).items()}


def _stacked(model: nn.Module) -> dict[tuple[int, str], Any]:
    """Loaded expert weights by layer and projection."""
    found = {}
    for layer, (module, _) in _methods(model).items():
        loaded = getattr(module, "tracefp4_loaded", {})
        for ours, theirs in WEIGHTS.items():
            found[layer, ours] = loaded.get(theirs, getattr(module, theirs)).data
    return found


def _attention(runner: Any) -> Any:
    layers = runner.compilation_config.static_forward_context.values()
    return next((layer.impl for layer in layers if hasattr(layer, "impl")), None)


def _watch(model: nn.Module, recorder: Recorder, runner: Any) -> list[Any]:
    """Tell the recorder of every forward pass. The hooks run inside vLLM's forward context."""
    from vllm.forward_context import get_forward_context

    cpu = recorder.device.type == "cpu"

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mappings: Any = get_forward_context().slot_mapping
        if not mappings:
            return  # A profiling run, which writes no KV.
        slots = next(iter(mappings.values()))
        count = slots.numel()
        recorder.begin(slots, kwargs["positions"][:count], kwargs["input_ids"][:count])
        if cpu:
            mark_generators(runner)

    def after(_: nn.Module, args: Any, output: Any) -> None:
        recorder.keep(recorder.end())

    return [
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, always_call=True),
    ]
