"""The trainer: a transformers model whose forward pass rounds as the rollout did.

``batch``      micro-batches: right-padded token rows and the guidance that belongs to them
``sites``      what the trainer does at each quantized tensor: fake quantization, guided where guidance exists
``weights``    quantized weights, kept for as long as the weights do not change
``policy``     token log-probabilities and entropies of a model bound to these sites
``ahead``      the next micro-batch made while this one trains
``ranks``      several processes that train one model
``sharding``   that model, in shards
``optimizer``  AdamW on FP32 master weights
``checkpoint`` everything that an exact resume needs

This package never imports ``rollout``: the two execution paths meet only in guidance.
"""
