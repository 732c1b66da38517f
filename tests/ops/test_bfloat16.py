"""Attention with bfloat16 values: within its bound of the attention of the rounded inputs, in float64.

CPUs round no factors, so the products' rounding is put in by hand.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

import heinsen
from heinsen.contrib.kernels import interpret
from heinsen.ops import chunked
from heinsen.ops.arrays import precision_of

OF_Y, OF_GRADIENTS = 2.0**-7, 2.0**-5  # relative to sum w |v| / Z, and to a tensor's largest gradient


def attend64(q, k, v, log_decay):
    """(y, sum w |v| / Z) of one head, by all pairs."""
    total = jnp.cumsum(log_decay)
    exponents = q[:, None] + k[None] + (total[:, None] - total[None])[..., None]
    weights = jnp.where(jnp.tril(jnp.ones((len(q),) * 2, bool)), jnp.exp(exponents).sum(-1), 0.0)
    weights = weights / weights.sum(-1, keepdims=True)
    return weights @ v, weights @ jnp.abs(v)


def round_factors(monkeypatch):
    """Round factors of products as accelerators do where the precision allows it."""
    exact = chunked.einsum

    def einsum(axes, *factors, precision=None):
        if precision == jax.lax.DotAlgorithmPreset.BF16_BF16_F32:
            factors = [x.astype(jnp.bfloat16).astype(x.dtype) for x in factors]
        return exact(axes, *factors)

    monkeypatch.setattr(chunked, "einsum", einsum)


@pytest.mark.parametrize(
    "implementation, signed, scale",
    [
        ("chunked", True, 1.0),
        ("chunked", True, 30.0),
        ("chunked", False, 1.0),
        pytest.param("pallas", True, 1.0, marks=pytest.mark.long),
        pytest.param("pallas", False, 1.0, marks=pytest.mark.long),
    ],
)
def test_y_and_gradients_are_within_the_bound(implementation, signed, scale, rng, monkeypatch):
    round_factors(monkeypatch)
    jax.clear_caches()
    n_tokens, d_key, d_value = 130, 16, 8
    q, k = (scale * rng.standard_normal((n_tokens, d_key)).astype(np.float32) for _ in range(2))
    values = jnp.asarray(rng.standard_normal((n_tokens, d_value)), jnp.bfloat16)
    log_decay = -0.1 * np.abs(rng.standard_normal(n_tokens)).astype(np.float32)
    cotangent = rng.standard_normal((n_tokens, d_value)).astype(np.float32)
    function = heinsen.attention if signed else heinsen.log_attention

    def run(*args):
        y, pull = jax.vjp(lambda *args: function(*args[:3], log_decay=args[3], implementation=implementation), *args)
        return y, pull(jnp.asarray(cotangent, y.dtype))

    with interpret.interpreted(InterpretGPUParams() if implementation == "pallas" else None):
        y, gradients = jax.jit(run)(q, k, values, log_decay)
    jax.clear_caches()
    assert y.dtype == (jnp.bfloat16 if signed else jnp.float32)
    assert [x.dtype for x in gradients] == [jnp.float32, jnp.float32, jnp.bfloat16, jnp.float32]

    def truth(q, k, values, log_decay):
        mean = attend64(q, k, values if signed else jnp.exp(values), log_decay)[0]
        return mean if signed else jnp.log(mean)

    with jax.enable_x64(True):
        args = [jnp.asarray(x, jnp.float64) for x in (q, k, values, log_decay)]
        want, pull = jax.vjp(truth, *args)
        size = attend64(*args)[1] if signed else 1.0
        wanted_gradients = pull(jnp.asarray(jnp.asarray(cotangent, y.dtype), jnp.float64))
        error = np.max(np.abs(np.float64(y) - want) / size)
        assert 2.0**-14 < error < OF_Y  # rounded, and no more than that
        for got, wanted in zip(gradients, wanted_gradients, strict=True):
            assert np.max(np.abs(np.float64(got) - wanted)) < OF_GRADIENTS * np.max(np.abs(wanted))


def test_float32_values_ask_for_exact_products():
    exact, rounded = jax.lax.Precision.HIGHEST, jax.lax.DotAlgorithmPreset.BF16_BF16_F32
    asked = {dtype: precision_of(jnp.zeros(1, dtype)) for dtype in (jnp.float32, jnp.float16, jnp.bfloat16)}
    assert asked == {jnp.float32: exact, jnp.float16: exact, jnp.bfloat16: rounded}
