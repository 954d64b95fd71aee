"""Triton kernels on raw tensors: the same numbers as the plain PyTorch code, in one pass instead of a dozen.

Nothing here decides anything. Each kernel has a reference above it, in ``formats``, ``quantizers``, ``guidance`` or
``models``, and equals it bit for bit (matrix products: up to the order of fp32 additions). The reference asks
:func:`tracefp4.kernels.runtime.usable` and hands over on a CUDA device; everywhere else it computes by itself. So a
machine without Triton loses speed and nothing else.

``runtime``    whether kernels are used, and the interpreter for tests
``rules``      arithmetic choices as compile-time constants
``scales``     device functions: block scales, global scales
``elements``   device functions: rounding to E2M1, to nearest and guided
``quantize``   scales, codes, operand and guidance planes in one pass
``residual``   the same, and once more what that missed
``guided``     guided rounding from packed guidance in one pass
``planes``     bit planes to bytes and back
``convolution``, ``delta_rule``  a step of a gated delta net in the rows of its states
``fingerprint``  weighted sums of words modulo 2^64
``stack``      frames of several sequences to the tensors of a batch
``token_scores``  log-probabilities and entropies of a training step, and their gradient
"""
