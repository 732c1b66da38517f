"""Attention with bfloat16 inputs: within its bound of the attention of the rounded inputs, in float64.

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

OF_Y, OF_GRADIENTS = 2.0**-7, 2.0**-6  # relative to sums of absolute terms: of y, sum w |v| / Z


def weights64(q, k, log_decay):
    """w / Z [T, T] of one head, by all pairs."""
    total = jnp.cumsum(log_decay)
    exponents = q[:, None] + k[None] + (total[:, None] - total[None])[..., None]
    weights = jnp.where(jnp.tril(jnp.ones((len(q),) * 2, bool)), jnp.exp(exponents).sum(-1), 0.0)
    return weights / weights.sum(-1, keepdims=True)


def sums_of_gradients(weights, v, dmean):
    """The largest sums of absolute terms of the gradients by q, k, v and log_decay."""
    terms = weights * (dmean @ v.T + jnp.sum(dmean * (weights @ v), -1, keepdims=True))  # by a log weight [t, s]
    crossing = jnp.cumsum(jnp.cumsum(terms[::-1], 0)[::-1], 1)  # of pairs with s <= its row's, t >= its column's
    of_decays = jnp.max(jnp.diagonal(crossing[1:]))
    return [jnp.max(terms.sum(1)), jnp.max(terms.sum(0)), jnp.max(weights.T @ dmean * v), of_decays]


def round_factors(monkeypatch):
    """Round factors of products as accelerators do where the precision allows it."""
    exact = chunked.einsum

    def einsum(axes, *factors, precision=None):
        if precision == jax.lax.DotAlgorithmPreset.BF16_BF16_F32:
            factors = [x.astype(jnp.bfloat16).astype(x.dtype) for x in factors]
        return exact(axes, *factors)

    monkeypatch.setattr(chunked, "einsum", einsum)


@pytest.mark.parametrize(
    "implementation, signed, scale, exponents",
    [
        ("chunked", True, 1.0, jnp.float32),
        ("chunked", True, 30.0, jnp.float32),
        ("chunked", False, 1.0, jnp.bfloat16),
        pytest.param("pallas", True, 1.0, jnp.float32, marks=pytest.mark.long),
        pytest.param("pallas", False, 1.0, jnp.float32, marks=pytest.mark.long),
        pytest.param("pallas", True, 1.0, jnp.bfloat16, marks=pytest.mark.long),
        pytest.param("pallas", False, 1.0, jnp.bfloat16, marks=pytest.mark.long),
        pytest.param("pallas", False, 30.0, jnp.bfloat16, marks=pytest.mark.long),  # terms are lost
    ],
)
def test_y_and_gradients_are_within_the_bound(implementation, signed, scale, exponents, rng, monkeypatch):
    round_factors(monkeypatch)
    jax.clear_caches()
    n_tokens, d_key, d_value = 130, 16, 8
    q, k = (jnp.asarray(scale * rng.standard_normal((n_tokens, d_key)), exponents) for _ in range(2))
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
    assert [x.dtype for x in gradients] == [exponents, exponents, jnp.bfloat16, jnp.float32]

    def truth(q, k, values, log_decay):
        mean = weights64(q, k, log_decay) @ (values if signed else jnp.exp(values))
        return mean if signed else jnp.log(mean)

    with jax.enable_x64(True):
        args = [jnp.asarray(x, jnp.float64) for x in (q, k, values, log_decay)]
        want, pull = jax.vjp(truth, *args)
        weights, v = weights64(args[0], args[1], args[3]), jnp.abs(args[2]) if signed else jnp.exp(args[2])
        dy = jnp.asarray(jnp.asarray(cotangent, y.dtype), jnp.float64)
        error = np.max(np.abs(np.float64(y) - want) / (weights @ v if signed else 1.0))
        assert 2.0**-14 < error < OF_Y  # rounded, and no more than that
        sums = sums_of_gradients(weights, v, jnp.abs(dy if signed else dy / (weights @ v)))
        if signed:  # v itself, not its logarithm
            sums[2] = jnp.max(weights.T @ jnp.abs(dy))
        for got, wanted, size in zip(gradients, pull(dy), sums, strict=True):
            assert np.max(np.abs(np.float64(got) - wanted)) < OF_GRADIENTS * size


def test_float32_values_ask_for_exact_products():
    exact, rounded = jax.lax.Precision.HIGHEST, jax.lax.DotAlgorithmPreset.BF16_BF16_F32
    asked = {dtype: precision_of(jnp.zeros(1, dtype)) for dtype in (jnp.float32, jnp.float16, jnp.bfloat16)}
    assert asked == {jnp.float32: exact, jnp.float16: exact, jnp.bfloat16: rounded}
