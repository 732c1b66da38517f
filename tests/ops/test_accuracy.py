"""float32 against the reference implementation in float64, over every dynamic range and decay and a few hard cases.

The bar: log y within 2e-4, and 2e-5 where no input exceeds some tens; gradients within 1e-4 of a tensor's largest.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import heinsen
from tests.ops.common import user_jit
from tests.ops.oracle import draw_decays

SIGMAS = (0.1, 1, 4, 8, 16, 32, 64)
FEATURES = 16
NAMES = ("q", "k", "values", "log_decay")
LONG = 500  # tokens: 16 chunks, of one shape for all quick tests: it is compiled once
EPSILON = 2.0**-24


@functools.cache
def compiled(function, jit, options):
    def run(arrays, ids, g):
        attend = functools.partial(getattr(heinsen, function), segment_ids=ids, **dict(options))
        y, pull = jax.vjp(lambda q, k, values, decay=None: attend(q, k, values, log_decay=decay), *arrays)
        return y, *pull(g.astype(y.dtype))

    return jit(run)


def run(arrays, g, dtype, function="log_attention", ids=None, jit=jax.jit, **options):
    """y and gradients by all arrays: q, k, values and log decays, if any."""
    with jax.enable_x64(dtype == np.float64):
        arrays, g = jax.tree.map(lambda x: jnp.asarray(x, dtype), (arrays, g))
        return jax.tree.map(np.asarray, compiled(function, jit, tuple(options.items()))(arrays, ids, g))


def more_rounding(form, n_tokens, sigma):
    """(of log y, of the gradient by log decays): what decays in long sequences add to the bars.

    The scan merges logarithms of sums, up to 10 (sigma + 1), ceil(log2 T) times for S and Z each; so does the chunked
    form once a chunk where values spread so far that it computes in logarithms. Gradients are exponentials of these,
    off by a part as large. The gradient by a decay is the sum of S dS over K V numbers, which cancels: dS sums up some
    T V cotangents near 1, of any sign, and is rounded T / 32 times. Each rounding is anything up to EPSILON; their sum
    is within 6 of its standard deviations in all but one of 1e8 numbers (a run compares some 1e5).
    """
    if n_tokens < 1000:
        return 0.0, 0.0
    merges = {"scan": np.ceil(np.log2(n_tokens)), "chunked": n_tokens / 32 if sigma > 8 else 0}[form]
    deviation = EPSILON / np.sqrt(3) * np.sqrt(n_tokens / 32 * n_tokens * FEATURES)
    return 2 * EPSILON * 10 * (sigma + 1) * merges, 6 * deviation


def check(arrays, g, sigma, floor=0.0, as_users=("chunked",)):
    """Gradients are compared relative to their largest, or to `floor` where they vanish: their terms are of order 1.

    What is measured is compiled as for users, where that is said: it takes long.
    """
    arrays, g = jax.tree.map(np.float32, (arrays, g))
    n_tokens, is_gated, bar = g.shape[-2], len(arrays) > 3, 2e-5 if sigma <= 8 else 2e-4
    # Many tokens are too much for the quadratic form's memory.
    yardstick = "scan" if is_gated and n_tokens > 256 else "reference"
    y64, *gradients64 = run(arrays, g, np.float64, implementation=yardstick)
    for form in ("chunked", "scan"):
        jit = user_jit if form in as_users else jax.jit
        y, *gradients = run(arrays, g, np.float32, jit=jit, implementation=form)
        more, more_of_decays = more_rounding(form, n_tokens, sigma) if is_gated else (0.0, 0.0)
        assert y.dtype == np.float32
        np.testing.assert_array_equal(np.isneginf(y), np.isneginf(y64))
        seen = np.isfinite(y64)
        error = np.max(np.abs(y[seen] - y64[seen]), initial=0)
        assert np.all(np.isfinite(y[seen])) and error <= bar + more, f"{form}: log y off by {error:.2g}"
        for name, x, want in zip(NAMES, gradients, gradients64, strict=False):
            assert np.all(np.isfinite(x)), f"{form}: gradient by {name}"
            error, largest = np.max(np.abs(x - want)), np.max(np.abs(want))
            # The scan's means of log values far below their largest are rounded to their size in each of its steps.
            relative = (max(1e-4, bar) if form == "scan" and not is_gated else 1e-4) + more
            allowed = max(relative * max(largest, floor), more_of_decays if name == "log_decay" else 0.0)
            assert error <= allowed, f"{form}: gradient by {name} off by {error:.2g} of {largest:.2g}"


def draw(rng, n_tokens, sigma_k, sigma_v, batch=(6,)):
    """(q, k and log v), a cotangent."""
    normal = lambda sigma: sigma * rng.standard_normal((*batch, n_tokens, FEATURES))
    return [normal(sigma_k), normal(sigma_k), normal(sigma_v)], normal(1)


def test_dynamic_ranges(rng):
    for sigma_k, sigma_v in [(0.1, 64), (8, 8), (64, 64)]:
        check(*draw(rng, LONG, sigma_k, sigma_v, batch=()), max(sigma_k, sigma_v))


@pytest.mark.long
@pytest.mark.parametrize("n_tokens", [1, 63, 256, 1000])
def test_every_dynamic_range(rng, n_tokens):
    # The plain scan is one program whatever the number of tokens: once. A single token has no sum of several terms, and
    # its query and key change nothing.
    as_users = {1: (), 256: ("chunked", "scan")}.get(n_tokens, ("chunked",))
    for sigma_k in SIGMAS:
        for sigma_v in SIGMAS:
            floor = 0.1 if n_tokens == 1 else 0.0
            check(*draw(rng, n_tokens, sigma_k, sigma_v), max(sigma_k, sigma_v), floor, as_users)


# ---- decays --------------------------------------------------------------------------------------
# Where tokens see little but themselves, most gradients vanish beside the cotangents, which are near 1.


@pytest.mark.parametrize("sigma", [1, pytest.param(8, marks=pytest.mark.long), 64])
def test_decays_of_every_size_in_one_sequence(rng, sigma):
    arrays, g = draw(rng, 100, sigma, sigma)
    check([*arrays, draw_decays(rng, (6, 100))], g, sigma, floor=0.1, as_users=())


@pytest.mark.long
@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("n_tokens", [1, 2, 63, 1000, 4096])
def test_every_size_of_decay_and_every_dynamic_range(rng, n_tokens, sigma):
    of_one_size = [np.full((2, n_tokens), decay) for decay in (-1e-6, -1e-2, -1.0, -50.0)]
    for decays in of_one_size:
        decays[:, 0] = -20.0  # so that the gradient by the decays does not vanish as a whole
    for decays in (draw_decays(rng, (2, n_tokens)), *of_one_size):
        arrays, g = draw(rng, n_tokens, sigma, sigma, (2,))
        check([*arrays, decays], g, sigma, floor=0.1)


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
    arrays, g = draw(rng, LONG, 1, 1, batch=())
    HARD[name](rng, *arrays, g)
    check(arrays, g, sigma=64, floor=0.01)


@pytest.mark.parametrize("form", ["chunked", pytest.param("scan", marks=pytest.mark.long)])
def test_a_state_of_a_million_tokens(rng, form):
    """Handed in as its sums: h_z = log 1e6 plus what keys of some nats add."""
    q, k, log_v = (x.astype(np.float32) for x in draw(rng, 63, 2, 2)[0])
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


OFFSET_OPTIONS = {"gate": {}, "causal": {}, "all keys": {"causal": False}, "all keys of documents": {"causal": False}}
OFFSET_CASES = [("log_attention", name) for name in OFFSET_OPTIONS]
OFFSET_CASES += [("attention", "gate"), ("attention", "all keys of documents")]
OFFSETS_QUICK = [("log_attention", "gate"), ("log_attention", "all keys of documents")]


@pytest.mark.parametrize("offset", [pytest.param(1e3, marks=pytest.mark.long), 1e5])
@pytest.mark.parametrize(
    "function, name",
    [pytest.param(*case, marks=[pytest.mark.long] * (case not in OFFSETS_QUICK)) for case in OFFSET_CASES],
)
def test_exponents_far_from_zero_cost_no_precision(rng, function, name, offset):
    """Of one entry, of all, and of each feature by its own number, which the queries take back.

    k + decay would round small decays away: shifts are subtracted first.
    """
    n_tokens, ids = 70, (np.arange(70) // 40).astype(np.int32) if "documents" in name else None
    q, k, values, g = (rng.standard_normal((2, n_tokens, n)) for n in (4, 4, 3, 3))
    decays = [-np.exp(rng.uniform(np.log(1e-6), np.log(0.1), (2, n_tokens)))] * (name == "gate")
    entry, each = np.zeros_like(k), np.round(offset * rng.standard_normal(4) / 4)
    entry[:, 45, 1] = offset
    for what, dq, dk in [
        ("entry", 0, entry),
        ("all keys", 0, offset),
        ("all below", 0, -offset),
        ("each", -each, each),
    ]:
        arrays = [np.float32(x) for x in (q + dq, k + dk, values, *decays)]
        given = dict(function=function, ids=ids, **OFFSET_OPTIONS[name])
        got = run(arrays, np.float32(g), np.float32, implementation="chunked", **given)
        want = run(arrays, np.float32(g), np.float64, implementation="reference", **given)
        for of, x, truth in zip(("y", *NAMES), got, want, strict=False):
            error = np.max(np.abs(np.float64(x) - truth))
            bar = 2e-5 if decays else 1e-5
            assert error <= bar * max(1, np.max(np.abs(truth))), f"{what}, {of}: off by {error:.2g}"


def test_a_public_state_rounds_its_log_sums_to_their_size(rng):
    """h_s and h_z are float32 numbers: at 1e5 they differ by 0.004 from what they stand for, and outputs with them."""
    (q, k, log_v), _ = draw(rng, 9, 1, 1, batch=())

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
