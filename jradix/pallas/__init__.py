"""Attention over the paged KV pool: arrays in, arrays out; `ops` is the only door."""
