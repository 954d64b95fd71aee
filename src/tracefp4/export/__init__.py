"""From a trained policy to a checkpoint in a deployed format.

``posthoc``      quantize the expert weights of a finished model, by one of several ways to choose codes and scales
``compressed``   a checkpoint for vLLM and SGLang, in the format of compressed-tensors
``calibration``  the energy of each input channel of the experts, which one of those ways asks for
"""
