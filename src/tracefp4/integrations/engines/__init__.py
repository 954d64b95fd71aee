"""What every external rollout engine needs to record guidance, so that each plugin only binds it to its own engine.

An engine such as SGLang or vLLM runs the model in processes of its own, with its own KV cache and scheduler. A plugin
in the process that runs the model meets three tensors on the way and hands them to a :class:`~.recorder.Recorder`::

    recorder.begin(slots, positions, tokens)        a forward pass starts; which KV slot each token writes
    operand = recorder.quantize(site, x, pairs)     at the input of each expert projection: rounded, and recorded
    k, v = recorder.key_value(layer, slots, k, v)   where K and V enter the cache: rounded, and recorded
    recorder.route(layer, ids)                      where a router has chosen
    recorder.keep(recorder.end())                   it is over; rows go to the host's mirror, by KV slot
    found = recorder.collect(slots, tokens, key)    a request ended and still owns its slots: one frame into the store

========================  ==============================================================================================
``settings``              what the plugin is told (spec, plan, model, where frames go), as JSON that processes inherit
``recorder``              rows by KV slot, and a finished request's frame
``experts``               routed experts in our W4A4 arithmetic, for devices without FP4 tensor cores
``weights``               names of a checkpoint for the trainer's tensors, and the checksum of what an engine serves
``options``               options that users give an engine under its own names, and which are refused
``handover``              frames and routes from the engine's process to the trainer's; a message carries a handle only
``looking``               looking on where an engine's own kernels round: codes are read, nothing is computed
``layouts``               layouts of FP4 kernels, undone: tiles of scales, rows that were moved
``stored``                experts that an engine keeps in FP4 itself, read back for the checksum
``sites``                 which site which quantization path exposes: the capability table
``coverage``              the coverage table of an engine, from what its plugin really bound
``wire``                  messages between the trainer's process and the one that hosts an engine
``host``                  the loop of that hosting process
``receipt``               from a host's reply to a rollout
``refit``                 new weights: a file, and the checksum that comes back
``hosted``                :class:`tracefp4.rollout.engine.Engine` on top of it
``selfcheck``             a prompt whose codes and log-probs must match after new weights
========================  ==============================================================================================

Nothing here imports an engine.
"""
