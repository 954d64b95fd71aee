"""The rollout path: an embedded engine with continuous batching, an FP4 KV pool and capture of outcomes."""
