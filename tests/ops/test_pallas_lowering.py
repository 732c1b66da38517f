"""The fused kernels, lowered for a GPU that is not there: whether this version of JAX knows all that they call.

The interpret mode does not: kernels that it runs differ. tests/plan compiles them, which needs the compiler.
"""

import jax
import jax.numpy as jnp

import heinsen
from heinsen import backend


def test_both_passes_are_lowered_for_the_device():
    def loss(q, k, log_v, log_decay):
        return jnp.sum(heinsen.log_attention(q, k, log_v, log_decay=log_decay, implementation="pallas"))

    array = lambda *shape: jax.ShapeDtypeStruct((2, 128, *shape), jnp.float32)
    keys, values = array(64), array(16)  # the most and the fewest features
    with backend.compiling_for("gpu"):
        traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).trace(keys, keys, values, array())
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert all("mosaic_gpu" in lowered and name in lowered for name in ("forward_kernel", "backward_kernel"))
