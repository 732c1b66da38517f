"""The fused kernels, lowered for devices that are not there: whether this version of JAX knows all that they call.

The interpret modes do not: kernels that they run differ. tests/plan compiles them, which needs the compilers.
"""

import jax
import jax.numpy as jnp
import pytest

import heinsen
from heinsen import backend


@pytest.mark.parametrize(
    "name, lowering, call",
    [("tpu", "tpu", "tpu_custom_call"), pytest.param("gpu", "cuda", "mosaic_gpu", marks=pytest.mark.long)],
)
def test_both_passes_are_lowered_for_the_device(name, lowering, call):
    def loss(q, k, log_v, log_decay):
        return jnp.sum(heinsen.log_attention(q, k, log_v, log_decay=log_decay, implementation="pallas"))

    array = lambda *shape: jax.ShapeDtypeStruct((2, 128, *shape), jnp.float32)
    keys, values = array(64), array(16)  # the most and the fewest features of the kernels for Hopper GPUs
    with backend.compiling_for(name):
        traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).trace(keys, keys, values, array())
    assert f"custom_call @{call}" in traced.lower(lowering_platforms=(lowering,)).as_text()
