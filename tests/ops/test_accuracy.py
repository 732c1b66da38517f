"""float32 against the reference implementation in float64, over every dynamic range and a few hard cases.

The bar: log y within 2e-4, and 2e-5 where no input exceeds some tens; gradients within 1e-4 of a tensor's largest.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import heinsen
from tests.ops.common import user_jit

SIGMAS = (0.1, 1, 4, 8, 16, 32, 64)
FEATURES = 16
FORMS = ["chunked", "scan"]
LONG = 500  # tokens: 16 chunks, of one shape for all quick tests: it is compiled once


@functools.cache
def compiled(implementation, n_tokens):
    def run(q, k, log_v, g):
        attend = functools.partial(heinsen.log_attention, implementation=implementation)
        y, pull = jax.vjp(attend, q, k, log_v)
        return y, *pull(g.astype(y.dtype))

    # What is measured is compiled as for users. The plain scan is one program whatever the number of tokens: once, in
    # the long tests. A single token has no sum of several terms.
    as_users = {"chunked": n_tokens > 1, "scan": n_tokens == 256, "reference": False}
    return (user_jit if as_users[implementation] else jax.jit)(run)


def run(implementation, arrays, dtype):
    with jax.enable_x64(dtype == np.float64):
        call = compiled(implementation, arrays[0].shape[-2])
        return [np.asarray(x) for x in call(*(x.astype(dtype) for x in arrays))]


def check(arrays, bar, floor=0.0):
    """Gradients are compared relative to their largest, or to `floor` where they vanish: their terms are of order 1."""
    arrays = [x.astype(np.float32) for x in arrays]
    y64, *gradients64 = run("reference", arrays, np.float64)
    for form in FORMS:
        y, *gradients = run(form, arrays, np.float32)
        assert y.dtype == np.float32
        np.testing.assert_array_equal(np.isneginf(y), np.isneginf(y64))
        seen = np.isfinite(y64)
        error = np.max(np.abs(y[seen] - y64[seen]), initial=0)
        assert np.all(np.isfinite(y[seen])) and error <= bar, f"{form}: log y off by {error:.2g}"
        for name, x, want in zip(("q", "k", "log_v"), gradients, gradients64, strict=True):
            assert np.all(np.isfinite(x)), f"{form}: gradient by {name}"
            error, largest = np.max(np.abs(x - want)), np.max(np.abs(want))
            # The scan's means of log values far below their largest are rounded to their size in each of its steps.
            relative = max(1e-4, bar) if form == "scan" else 1e-4
            assert error <= relative * max(largest, floor), (
                f"{form}: gradient by {name} off by {error:.2g} of {largest:.2g}"
            )


def draw(rng, n_tokens, sigma_k, sigma_v, batch=(6,)):
    """q, k, log_v and a cotangent."""
    normal = lambda sigma: sigma * rng.standard_normal((*batch, n_tokens, FEATURES))
    return [normal(sigma_k), normal(sigma_k), normal(sigma_v), normal(1)]


def check_grid(rng, n_tokens, sigmas_k, sigmas_v):
    for sigma_k in sigmas_k:
        for sigma_v in sigmas_v:
            bar = 2e-5 if max(sigma_k, sigma_v) <= 8 else 2e-4
            # A single token's query and key change nothing.
            check(draw(rng, n_tokens, sigma_k, sigma_v), bar, floor=0.1 if n_tokens == 1 else 0.0)


def test_dynamic_ranges(rng):
    for sigma_k, sigma_v in [(0.1, 64), (8, 8), (64, 64)]:
        bar = 2e-5 if max(sigma_k, sigma_v) <= 8 else 2e-4
        check(draw(rng, LONG, sigma_k, sigma_v, batch=()), bar)


@pytest.mark.long
@pytest.mark.parametrize("n_tokens", [1, 63, 256, 1000])
def test_every_dynamic_range(rng, n_tokens):
    check_grid(rng, n_tokens, SIGMAS, SIGMAS)


# ---- hard cases ----------------------------------------------------------------------------------

HARD = {}


def hard(case):
    HARD[case.__name__] = case
    return case


@hard
def keys_rise_by_120_nats_within_a_chunk_and_fall_again(rng, q, k, log_v, g):
    k[..., 40:48, :] += 120


@hard
def the_largest_value_carries_weight_e_to_the_minus_100(rng, q, k, log_v, g):
    log_v[..., 10, :] += 100
    k[..., 10, :] -= 100


@hard
def one_feature_dominates(rng, q, k, log_v, g):
    q[..., 3] += 90
    k[..., 3] += 30


@hard
def zero_values(rng, q, k, log_v, g):
    log_v[rng.random(log_v.shape) < 0.3] = -np.inf
    log_v[..., :2] = -np.inf  # columns that are always zero
    g[np.isneginf(log_v)] = 0  # the derivative of log 0 is no number worth comparing
    g[..., :2] = 0


@hard
def masked_keys(rng, q, k, log_v, g):
    k[rng.random(k.shape) < 0.3] = -np.inf
    k[..., 5, :] = k[..., 0, :] = -np.inf
    g[..., 0, :] = 0  # the first query sees nothing


@hard
def all_keys_equal(rng, q, k, log_v, g):
    k[...] = k[..., :1, :1]


@hard
def queries_of_one_document_reach_far_below_the_next(rng, q, k, log_v, g):
    k[..., :100, :] -= 95
    q[..., 1::2, :] -= np.linspace(0, 200, FEATURES)


@pytest.mark.parametrize("name", HARD)
def test_hard_cases(rng, name):
    arrays = draw(rng, LONG, 1, 1, batch=())
    HARD[name](rng, *arrays)
    check(arrays, 2e-4, floor=0.01)


@pytest.mark.parametrize("form", ["chunked", pytest.param("scan", marks=pytest.mark.long)])
def test_a_state_of_a_million_tokens(rng, form):
    """Handed in as its sums: h_z = log 1e6 plus what keys of some nats add."""
    q, k, log_v, _ = (x.astype(np.float32) for x in draw(rng, 63, 2, 2))
    h_z = (np.log(1e6) + 2 * rng.standard_normal((6, FEATURES))).astype(np.float32)
    h_s = (h_z[..., None] + rng.standard_normal((6, FEATURES, FEATURES))).astype(np.float32)

    def attend(implementation, dtype):
        with jax.enable_x64(dtype == np.float64):
            state = heinsen.LogState(jnp.asarray(h_s, dtype), jnp.asarray(h_z, dtype))
            call = functools.partial(heinsen.log_attention, implementation=implementation, return_state=True)
            y, end = jax.jit(call)(*(x.astype(dtype) for x in (q, k, log_v)), state=state)
            return [np.asarray(x) for x in (y, *end)]

    for got, want in zip(attend(form, np.float32), attend("reference", np.float64), strict=True):
        assert np.max(np.abs(got - want)) <= 2e-5


OFFSET_KEYS = {"keys up to its own": True, "all keys": False, "all keys of its document": False}
OFFSET_CASES = [
    pytest.param("log_attention", "keys up to its own", marks=pytest.mark.long),
    pytest.param("log_attention", "all keys", marks=pytest.mark.long),
    ("log_attention", "all keys of its document"),
    pytest.param("attention", "all keys of its document", marks=pytest.mark.long),
]


@functools.cache
def compiled_with(function, keys, implementation):
    def run(q, k, values, ids, g):
        ids = ids if "document" in keys else None
        attend = functools.partial(
            getattr(heinsen, function), causal=OFFSET_KEYS[keys], segment_ids=ids, implementation=implementation
        )
        y, pull = jax.vjp(attend, q, k, values)
        return y, *pull(g.astype(y.dtype))

    return jax.jit(run)


@pytest.mark.parametrize("function, keys", OFFSET_CASES)
@pytest.mark.parametrize("offset", [pytest.param(1e3, marks=pytest.mark.long), 1e5])
def test_exponents_far_from_zero_cost_no_precision(rng, function, keys, offset):
    """Of one entry, of all, and of each feature by its own number, which the queries take back."""
    n_tokens, ids = 70, (np.arange(70) // 40).astype(np.int32)
    q, k, values, g = (rng.standard_normal((2, n_tokens, n)) for n in (4, 4, 3, 3))
    entry, each = np.zeros_like(k), np.round(offset * rng.standard_normal(4) / 4)
    entry[:, 45, 1] = offset
    for name, dq, dk in [
        ("entry", 0, entry),
        ("all keys", 0, offset),
        ("all below", 0, -offset),
        ("each", -each, each),
    ]:
        arrays = [x.astype(np.float32) for x in (q + dq, k + dk, values, g)]
        got = compiled_with(function, keys, "chunked")(*arrays[:3], ids, arrays[3])
        with jax.enable_x64(True):
            arrays = [x.astype(np.float64) for x in arrays]
            want = jax.tree.map(np.asarray, compiled_with(function, keys, "reference")(*arrays[:3], ids, arrays[3]))
        for what, x, truth in zip(("y", "dq", "dk", "dvalues"), got, want, strict=True):
            error = np.max(np.abs(np.float64(x) - truth))
            assert error <= 1e-5 * max(1, np.max(np.abs(truth))), f"{name}, {what}: off by {error:.2g}"


def test_a_public_state_rounds_its_log_sums_to_their_size(rng):
    """h_s and h_z are float32 numbers: at 1e5 they differ by 0.004 from what they stand for, and outputs with them."""
    q, k, log_v, _ = draw(rng, 9, 1, 1, batch=())

    def read_state(q, k, log_v):
        state = heinsen.log_attention(q, k, log_v, return_state=True, implementation="scan")[1]
        return heinsen.query_state(state, q)

    read_all = functools.partial(heinsen.log_attention, causal=False, implementation="reference")
    for offset, bar in [(0, 2e-6), (1e3, 5e-4), (1e5, 5e-2)]:
        arrays = [x.astype(np.float32) for x in (q, k + offset, log_v)]
        got = np.float64(jax.jit(read_state)(*arrays))
        with jax.enable_x64(True):
            want = np.asarray(jax.jit(read_all)(*map(np.float64, arrays)))
        assert np.max(np.abs(got - want)) <= bar
