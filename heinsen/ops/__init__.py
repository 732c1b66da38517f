"""Attention on arrays: no parameters, no Flax. `heinsen.ops.api` has the public functions."""
