"""The forget gate: how much of what a head remembers each token leaves, computed from the layer's normalized input.

    log_decay[t, h] = scale[h] log_sigmoid(W x[t] + b)[h] <= 0

With scale = 1 and W = 0, a head forgets with a time constant of 1 / -log_sigmoid(b) tokens. The biases b start so that
these are spread geometrically over the heads: some forget within a few tokens, some hardly at all. With scale = 0
nothing is forgotten: a model without a gate.

Axes: B batch, T tokens, D d_model, H heads.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from heinsen.logspace import log_sigmoid
from heinsen.models.dense import matmul, weight_init


class ForgetGate(nn.Module):
    """Log decays of n_heads heads, whose time constants start between `shortest` and `longest` tokens."""

    n_heads: int
    shortest: float
    longest: float
    dtype: str
    init_std: float | None = None  # of the initial W: see `weight_init`

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B H T"]:
        d_model = x.shape[-1]
        kernel = self.param("kernel", weight_init(d_model, self.init_std), (d_model, self.n_heads))
        bias = self.param("bias", lambda _: spread_biases(self.shortest, self.longest, (self.n_heads,)))
        scale = self.param("scale", nn.initializers.ones, (self.n_heads,))
        log_gate = log_sigmoid(matmul(x, kernel, self.dtype) + bias)
        # At least 0, with the gradient of the identity: a head whose scale is 0 can begin to forget.
        scale = scale + jax.lax.stop_gradient(jnp.maximum(scale, 0) - scale)
        return jnp.swapaxes(scale * log_gate, 1, 2)


def spread_biases(shortest: float, longest: float, shape: tuple[int, ...]) -> Float[Array, "*stack H"]:
    """Biases of this shape for time constants spread geometrically over the heads, from `shortest` to `longest`."""
    rates = 1 / jnp.geomspace(shortest, longest, shape[-1], dtype=jnp.float32)
    return jnp.broadcast_to(-jnp.log(jnp.expm1(rates)), shape)  # log_sigmoid(b) = -rate
