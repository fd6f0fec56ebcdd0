"""LLM inference for JAX in which every request shares the KV cache of every other."""
