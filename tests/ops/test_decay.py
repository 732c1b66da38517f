"""The forget gate: which form of the computation takes it, its laws, and very many steps. Sizes: test_accuracy.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import heinsen
from heinsen import LogState, MeanState, merge_states
from heinsen.ops import chunked, logarithms
from heinsen.ops.api import attend_both_ways
from heinsen.ops.decay import ChunkDecay
from tests.ops.common import user_jit
from tests.ops.oracle import draw_decays

FEATURES = 16


def test_sums_within_a_chunk_are_not_rounded_to_the_largest(rng):
    """A float32 running sum that passes through -1600 is off by 1e-4."""
    decays = draw_decays(rng, (50, 64))
    decays[np.isneginf(decays)] = -50.0
    decays[..., -8:] *= 1e-4
    got = jax.jit(lambda x: ChunkDecay.of(x, 8))(decays)
    exact = np.cumsum(decays.astype(np.float64), axis=-1)
    of_keys = np.tril(np.exp(np.minimum(exact[..., :, None] - exact[..., None, :], 0)))
    np.testing.assert_allclose(np.exp(got.keys_at_queries), of_keys, rtol=2e-5, atol=1e-30)
    np.testing.assert_allclose(got.keys_at_end, exact[..., -1:] - exact, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(got.before_at_queries, exact, rtol=1e-6, atol=1e-7)
    naive = np.cumsum(decays, axis=-1)
    assert np.abs((naive[..., -1:] - naive) - (exact[..., -1:] - exact))[..., -8:].max() > 1e-6


@pytest.fixture
def lose(monkeypatch):
    """lose(module, name): let a form of the computation return NaN; what is finite was computed without it."""

    def lose(module, name):
        form = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: jax.tree.map(lambda x: x * jnp.nan, form(*args)))
        jax.clear_caches()

    yield lose
    jax.clear_caches()


@pytest.mark.parametrize("function", ["log_attention", "attention"])
def test_ordinary_inputs_take_one_product_per_chunk_and_wide_ones_do_not(rng, function, lose):
    """Inputs up to sigma = 4 and decays from -5 to 0, and a number of tokens that fills no chunk."""
    lose(chunked, "block_weights")
    run = jax.jit(getattr(heinsen, function))
    for sigma in (1, 4, 64):
        arrays = [np.float32(sigma * rng.standard_normal((8, 700, FEATURES))) for _ in range(2)]
        arrays.append(np.float32(rng.standard_normal((8, 700, FEATURES))))
        decays = -5 * rng.random((8, 700)).astype(np.float32)
        decays[1], decays[2], decays[3] = -5, 0, -1e-3
        decays[4] = np.where(rng.random(700) < 0.5, -5, -1e-4)
        decays[5] = np.where(rng.random(700) < 0.1, -np.inf, -1e-4)
        assert np.all(np.isfinite(run(*arrays, log_decay=decays))) == (sigma != 64)


@pytest.mark.parametrize("function", ["log_attention", "attention"])
def test_exponents_that_spread_take_blocks_and_no_logarithms(rng, function, lose):
    for module, name in ((chunked, "product_weights"), (logarithms, "attend")):
        lose(module, name)
    q, k = (np.float32(64 * rng.standard_normal((2, 100, FEATURES))) for _ in range(2))
    v = np.float32(rng.standard_normal((2, 100, FEATURES)))
    decays = draw_decays(rng, (2, 100))
    assert np.all(np.isfinite(jax.jit(getattr(heinsen, function))(q, k, v, log_decay=decays)))


@pytest.mark.parametrize("nats, form", [(59, "product_weights"), (61, "block_weights"), (64, "logarithms")])
def test_values_below_a_later_one_take_a_product_up_to_60_nats_and_logarithms_from_63(nats, form, lose):
    """Sums of the first tokens are exp(-nats) of the last one's value; 1e-27 is exp(-62.2)."""
    log_v = jnp.zeros((1, 8, 2)).at[:, -1].set(nats)
    attend = jax.jit(functools.partial(heinsen.log_attention, jnp.zeros((1, 8, 2)), jnp.zeros((1, 8, 2))))
    y = attend(log_v)
    np.testing.assert_allclose(y[:, :-1], 0.0, atol=1e-6)
    np.testing.assert_allclose(y[:, -1], nats - np.log(8), rtol=1e-6)
    if form == "logarithms":
        lose(logarithms, "attend")
        assert not np.all(np.isfinite(attend(log_v)))
    else:
        lose(chunked, {"product_weights": "block_weights", "block_weights": "product_weights"}[form])
        lose(logarithms, "attend")
        assert np.all(np.isfinite(attend(log_v)))


@pytest.mark.parametrize("gated", [False, True])
def test_both_directions_take_one_product_per_chunk(rng, lose, gated):
    """Even at the last token of a document, which sees none after it."""
    lose(chunked, "block_weights")
    q, k, log_v = (jnp.float32(rng.standard_normal((2, 45, 4))) for _ in range(3))
    ids = jnp.asarray(np.cumsum(rng.random((2, 45)) < 0.3, axis=-1))
    if gated:
        decays = {name: -jnp.float32(rng.random((2, 45))) for name in ("log_decay", "log_decay_after")}
        y = attend_both_ways(q, k, log_v, **decays, segment_ids=ids, signed=False)
    else:
        y = heinsen.log_attention(q, k, log_v, causal=False, segment_ids=ids, implementation="chunked")
    assert np.all(np.isfinite(y))


@pytest.mark.parametrize("value, decay, in_logarithms", [(100.0, -0.8, False), (100.0, -4.0, True), (1e3, -1.0, True)])
def test_a_large_value_that_is_forgotten_is_out_of_later_chunks(rng, value, decay, in_logarithms, lose):
    """Shifts fall from chunk to chunk. Where a value is forgotten within one, logarithms hold what is left."""
    q, k, log_v = (jnp.asarray(rng.standard_normal((2, 160, FEATURES)), jnp.float32) for _ in range(3))
    log_v, decays = log_v.at[:, 0].add(value), jnp.full((2, 160), decay)
    decays = decays.at[:, 40].set(-jnp.inf if value > 100 else decay)  # a document ends
    attend = lambda **options: jax.jit(functools.partial(heinsen.log_attention, **options))(
        q, k, log_v, log_decay=decays
    )
    with jax.enable_x64(True):
        arrays = [x.astype(np.float64) for x in (q, k, log_v)]
        want = jax.jit(functools.partial(heinsen.log_attention, implementation="reference"))(
            *arrays, log_decay=decays.astype(np.float64)
        )
    np.testing.assert_allclose(attend(), want, atol=2e-4)
    lose(logarithms, "attend")
    assert np.all(np.isfinite(attend(implementation="chunked"))) != in_logarithms


# ---- laws ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [LogState, MeanState])
def test_states_with_their_decays_are_a_monoid_in_order(rng, kind):
    """(a, x) (b, y) = (a + b, merge(x, y, b)): associative, with pieces of a sequence as elements."""
    function = heinsen.log_attention if kind is LogState else heinsen.attention
    attend = jax.jit(functools.partial(function, implementation="reference", return_state=True))
    arrays = [jnp.float32(rng.standard_normal((2, 30, 4))) for _ in range(3)]
    decays = jnp.asarray(np.maximum(draw_decays(rng, (2, 30)), -2))
    cut = lambda part: attend(*(x[:, part] for x in arrays), log_decay=decays[:, part])[1]
    parts = [slice(0, 7), slice(7, 8), slice(8, 30)]
    (x, y, z), (_, b, c) = map(cut, parts), (jnp.sum(decays[:, part], axis=-1) for part in parts)
    left = merge_states(merge_states(x, y, log_decay=b), z, log_decay=c)
    right = merge_states(x, merge_states(y, z, log_decay=c), log_decay=b + c)
    close = functools.partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-5)
    jax.tree.map(close, left, right)
    jax.tree.map(close, left, cut(slice(0, 30)))
    assert not np.allclose(left.h_z, merge_states(merge_states(x, y), z).h_z, atol=1e-2)
    gone = merge_states(jax.tree.map(lambda x: x * np.nan, x), y, log_decay=jnp.full(2, -jnp.inf))
    jax.tree.map(close, gone, y)  # nothing of it is left, NaN included


@pytest.mark.long
def test_values_far_from_one_cost_no_precision(rng):
    """Shifts of values that fall by less than they are rounded to must not count as falling by more."""
    n, offset = 2048, 1e5
    noise = rng.standard_normal((1, n, FEATURES)).astype(np.float32)
    log_v, decays = (np.float32(offset) + 0.1 * noise).astype(np.float32), np.full((1, n), -1e-4, np.float32)
    arrays = [0 * noise, 0 * noise, log_v]
    got = np.asarray(user_jit(heinsen.log_attention)(*arrays, log_decay=decays))
    with jax.enable_x64(True):
        scan = jax.jit(functools.partial(heinsen.log_attention, implementation="scan"))
        want = np.asarray(scan(*map(np.float64, arrays), log_decay=np.float64(decays)))
    assert np.abs(got - want).max() < 0.02  # float32 holds log y itself to 0.004


def test_what_is_not_finite_stays_in_its_row_in_both_directions(rng):
    q, k, v = (jnp.asarray(rng.standard_normal((2, 9, 4)), jnp.float32) for _ in range(3))
    decays, v = jnp.full((2, 9), -0.1, jnp.float32), v.at[0, 4, 0].set(jnp.nan)
    gated = attend_both_ways(q, k, v, log_decay=decays, log_decay_after=decays, signed=True)
    plain = heinsen.attention(q, k, v, causal=False, segment_ids=jnp.arange(9) // 6, implementation="chunked")
    for y in (gated, plain):
        assert np.all(np.isfinite(y[1])) and not np.any(np.isfinite(y[0, 4:6, 0]))
