"""What is kept of a rollout's roundings, and how it travels from the engine to the trainer.

``plan``          which outcomes are kept: bits a code, layers, kinds of site, bits a scale
``codec``         bit planes, and checksums of restored scales
``record``        the outcomes of one rollout in memory
``header``        the description at the start of a frame, and the exact place of every byte
``frame``         a record as bytes and back, checked before anything is believed
``sizes``         what a plan costs in bytes, part by part
``store``         where frames lie between the two sides (``memory_store``, ``file_store``, and ``late_store``,
                  whose frames stay with their engine until somebody wants them)

Scales are reduced and restored in :mod:`tracefp4.quantizers.congruent`; here they are only packed and moved.
"""
