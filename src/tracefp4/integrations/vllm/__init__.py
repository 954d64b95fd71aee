"""TRACE inside vLLM: FP4 experts, FP4 KV cache, and a record of how each value was rounded.

vLLM is extended through its own plugin points; nothing is forked::

    vllm.general_plugins    registers everything below in each of vLLM's processes          plugin
    quantization method     routed experts in our W4A4, other layers as they are            quantization, experts
    attention backends      K and V rounded to FP4 before they enter a CPU's cache          attention
                            FP4 pages and attention over them, on any device                paged, pages
    worker extension        recorder, checksum and probe on the worker                      worker, recorder, names
    KV connector            gathers a finished request's rows before its blocks are freed   connector, recorder
    routed-experts channel  carries rows instead, where the second model runner runs        attach, capturer, reader,
                                                                                            kv_rows
    weight transfer engine  new weights through vLLM's start, update, finish                transfer

Where vLLM's own FP4 kernels compute, its quantizers are wrapped and only looked at (``binding``, ``observe``,
``native``), its own NVFP4 KV pages are read (``own_pages``), and its packed experts are read back for the checksum
(``stored``).

Outcomes are recorded in rows that belong to KV slots, as in the embedded engine: a prefix-cache hit finds the rows that
the first request left behind, and what vLLM evicts is overwritten by the slot's next owner. ``engine`` makes a
:class:`tracefp4.rollout.engine.Engine` of it, found under the entry point ``vllm``. ``docs/vllm.md`` is the user guide.

Modules below import vLLM and are loaded by vLLM or by the engine, never by the rest of the package.
"""
