"""Keys as the kernels take them."""

import jax.numpy as jnp

from heinsen.ops.chunk import Keys


def with_decay(keys: Keys) -> Keys:
    """Keys with log decays of 0 if documents start without a forget gate: the kernels know one way to forget."""
    if keys.resets is None or keys.log_decay is not None:
        return keys
    return keys._replace(log_decay=jnp.zeros_like(keys.k[..., :1]))
