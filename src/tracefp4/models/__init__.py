"""The seams of a transformers model at which values are quantized, and what is known about a model's layers."""
