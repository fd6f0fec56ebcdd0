"""Model families on flax.nnx; they see the KV pool as an array and pages as integers, never the cache."""
