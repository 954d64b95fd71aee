"""Entry point of ``sglang.srt.plugins``: SGLang calls it once in each of its processes.

A process that was not told to record is left exactly as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tracefp4.integrations.engines.settings import active_settings
from tracefp4.integrations.sglang.worker import KEY

_MANAGERS = "sglang.srt.managers"


def register() -> None:
    """Register the quantization method and the hooks; see :mod:`tracefp4.integrations.sglang`."""
    settings = active_settings()
    if settings is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from tracefp4.integrations.sglang import capture, kv, refit, seeds

    _register_quantization()
    hook = HookRegistry.register
    hook(
        "sglang.srt.state_capturer.routed_experts.RoutedExpertsCapturer.create", capture.make_capturer, HookType.REPLACE
    )
    hook("sglang.srt.model_executor.model_runner.ModelRunner.forward", capture.begin_forward, HookType.BEFORE)
    results = f"{_MANAGERS}.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
    hook(f"{results}._maybe_collect_routed_experts", capture.collect_finished, HookType.AFTER)
    streamer = f"{_MANAGERS}.scheduler_components.output_streamer.SchedulerOutputStreamer"
    hook(f"{streamer}.is_request_level_customized_info_key", capture.whole_field, HookType.AFTER)
    info = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
    hook(f"{info}.from_schedule_batch", seeds.give_seeds, HookType.AFTER)
    if not settings.emulate:
        _observe()
    elif settings.spec.kv is not None:
        hook("sglang.srt.layers.radix_attention.RadixAttention.forward", kv.round_key_value, HookType.BEFORE)
        hook("sglang.srt.models.utils.enable_fused_set_kv_buffer", kv.no_fused_write, HookType.REPLACE)
        rotary = "sglang.srt.layers.rotary_embedding.base.RotaryEmbedding"
        hook(f"{rotary}.try_bf16_rope_store", kv.no_fused_store, HookType.REPLACE)
    hook("sglang.srt.model_loader.utils.get_model_architecture", same_architecture, HookType.AROUND)
    _replace_hash()
    _add_report(refit.report)


def same_architecture(original: Callable[..., Any], model_config: Any) -> Any:
    """Around ``get_model_architecture(model_config)``: our method changes no architecture.

    SGLang serves a quantized Mixtral, by any method that is not on a list of its own, with another model class, whose
    experts are separate linear layers that no method for routed experts sees.
    """
    method = model_config.quantization
    if method != KEY:
        return original(model_config)
    model_config.quantization = None
    try:
        return original(model_config)
    finally:
        model_config.quantization = method


def _register_quantization() -> None:
    from sglang.srt.arg_groups.choices import add_quantization_method_choices
    from sglang.srt.layers import quantization

    from tracefp4.integrations.sglang.quantization import TraceConfig

    quantization.QUANTIZATION_METHODS[KEY] = TraceConfig
    quantization.CPU_QUANTIZATION_METHODS[KEY] = TraceConfig
    add_quantization_method_choices([KEY])


def _observe() -> None:
    """SGLang has kernels of its own for the spec: look on."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from tracefp4.integrations.sglang.native import bind_observers
    from tracefp4.integrations.sglang.observe import Watch
    from tracefp4.integrations.sglang.worker import worker

    def register(target: str, hook: Any, kind: str) -> None:
        HookRegistry.register(target, hook, HookType(kind))

    bind_observers(register, Watch(lambda: worker().recorder if worker().recording else None))


def _replace_hash() -> None:
    import torch

    if torch.cuda.is_available():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from tracefp4.integrations.sglang import seeds

    HookRegistry.register("sglang.kernels.ops.sampling.murmur_hash.murmur_hash32", seeds.hash32, HookType.REPLACE)


def _add_report(report: object) -> None:
    """``Engine.collective_rpc`` calls methods of the scheduler by name; this is ours."""
    from sglang.srt.managers.scheduler import Scheduler

    setattr(Scheduler, f"{KEY}_report", report)
