"""TRACE inside SGLang: FP4 experts, FP4 KV cache, and a record of how each value was rounded.

SGLang is extended through its plugin framework; nothing is forked. ``plugin.register`` is called in every process of
SGLang (entry point ``sglang.srt.plugins``) and does nothing unless the process was told to
(:mod:`tracefp4.integrations.engines.settings`). Then::

    QUANTIZATION_METHODS         routed experts in our W4A4, other layers as they are           quantization
    RadixAttention.forward       K and V rounded to FP4 before they are cached or attended to   kv
    RoutedExpertsCapturer        replaced by one that carries our rows by KV slot               capture
    scheduler's result handling  gathers a finished request's rows before its slots are freed   capture
    custom weight loader         new weights inside begin/end_weight_update, then a checksum    refit
    SamplingBatchInfo            each request's own random numbers                              seeds

What SGLang does for routed experts is done for our rows by the same code of its own: copies off the critical path,
overlap scheduling, CUDA graphs. A request turns recording on with one option, ``sampling_params.custom_params
["tracefp4"]``, and its reply carries a handle in ``meta_info["tracefp4"]``; the bytes lie in a shared folder.

``engine`` makes a :class:`tracefp4.rollout.engine.Engine` of it, found under the entry point ``sglang``; ``backend``
runs in the process that hosts SGLang. ``native`` lists the quantization paths of Blackwell, ``observe`` watches them,
``stored`` reads SGLang's own packed experts back. ``docs/sglang.md`` is the user guide. Modules below import SGLang
inside functions, or are loaded by SGLang's own processes alone.
"""
