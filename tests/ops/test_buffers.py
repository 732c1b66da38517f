"""Reading from buffers of keys: decoding with sigmoid attention, and the cache of softmax attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import heinsen
from heinsen.ops import softmax
from tests.arrays import takes_numpy, to_jax
from tests.ops.common import small_sizes
from tests.ops.oracle import Form, assert_close, draw_case, draw_cotangents, truth

T, H, K = 11, 3, 4
sigmoid_attention_cached = takes_numpy(heinsen.sigmoid_attention_cached)


def true_y(form, case, rng):
    return truth(form, case, draw_cotangents(rng, form, case))[0][0]


# ---- sigmoid -------------------------------------------------------------------------------------


def test_decoding_from_a_buffer_gives_the_rows_of_the_whole(rng):
    """Blocks of 3 queries, at another position in each sequence, with one compiled function; junk after the end."""
    capacity, size, options = T + 6, 3, {"alpha": 0.75, "bias": "-log_n"}
    case, form = draw_case(rng, "sigmoid", (2,), T, mean_length=5), Form("sigmoid", tuple(options.items()))
    packed, whole = true_y(form, case, rng), true_y(form, case.change(np.zeros_like(case.ids)), rng)
    assert not np.array_equal(whole, packed)
    begins = np.diff(case.ids, axis=-1, prepend=case.ids[:, :1]) != 0
    begins = np.maximum.accumulate(np.where(begins, np.arange(T), 0), axis=-1)
    junk = lambda x: np.concatenate([x, 1e6 * np.ones((2, capacity - T, x.shape[-1]), np.float32)], axis=1)
    attend = jax.jit(functools.partial(sigmoid_attention_cached, **options))
    for n in np.stack([rng.permutation(np.arange(size, T + 1)) for _ in range(2)], axis=1):
        rows = n[:, None] - size + np.arange(size)
        pick = lambda x, rows=rows: np.take_along_axis(x, rows[..., None], axis=1)
        filled = [np.where(np.arange(T)[:, None] < n[:, None, None], case.x[name], 1e6) for name in ("k", "values")]
        with small_sizes():
            assert_close(attend(pick(case.x["q"]), *map(junk, filled), n, first=0 * rows), pick(whole), 1e-6)
            first = np.take_along_axis(begins, rows, axis=1)
            assert_close(attend(pick(case.x["q"]), *map(junk, filled), n, first=first), pick(packed), 1e-6)


def test_an_offset_places_the_queries_and_who_sees_nothing_gets_0(rng):
    q, k, v = (draw_case(rng, "sigmoid", (), 3, T).x[name] for name in ("q", "k", "values"))
    attend = jax.jit(sigmoid_attention_cached, static_argnames="causal")

    def want(*stops):
        weights = lambda q, n: 1 / (1 + np.exp(-np.float64(k[:n]) @ np.float64(q) / np.sqrt(K)))
        return np.stack([weights(x, n) @ v[:n] / n for x, n in zip(q, stops, strict=True)])

    assert not np.any(attend(q, k, v, 0))
    assert_close(attend(q, k, v, 5, offset=3), want(4, 5, 5), 1e-6)
    assert_close(attend(q, k, v, 5, causal=False), want(5, 5, 5), 1e-6)
    assert_close(attend(q, k, v, T + 9, causal=False), want(T, T, T), 1e-6)
    before = np.asarray(attend(q, k, v, 2))  # the first of the three would be token -1
    assert not np.any(before[0]) and np.all(np.any(before[1:], axis=-1))
    gradient = jax.jit(jax.grad(lambda v: jnp.sum(sigmoid_attention_cached(q, k, v, 5))))(v)
    assert np.all(gradient[:5]) and not np.any(gradient[5:])


# ---- softmax -------------------------------------------------------------------------------------


def test_a_cache_with_a_gate_equals_all_pairs(rng):
    """Read at once, and by a step, both of documents that begin in some slot, at slots that differ by row."""
    n = 23
    case = draw_case(rng, "softmax", (2, H), n, d_key=K, d_value=K, scale=2)
    slots, first = np.arange(n) + [[0], [5]], np.array([[2], [9]])
    log_decay, is_seen = np.float32(-rng.exponential(1, (2, H, n))), (slots >= first)[:, None, :]
    case = case.change(np.broadcast_to(np.int32(is_seen), (2, H, n)), log_decay=log_decay)
    want, (q, k, v) = true_y(Form("softmax"), case, rng), (to_jax(case.x[name]) for name in ("q", "k", "values"))
    cache = softmax.init_cache(2, H, 30, K, K, jnp.float32)._replace(decayed=jnp.zeros((2, H, 30, 1)))

    def cut(cache, start, stop):
        k_piece, v_piece, decays = (x[:, :, start:stop] for x in (k, v, to_jax(log_decay)))
        at = to_jax(slots[:, start:stop])
        return softmax.KVCache(k_piece, v_piece, softmax.sum_decays(cache, decays, at)), at

    for start, stop in ((0, 9), (9, n - 1), (n - 1, n)):
        before, (piece, at) = cache, cut(cache, start, stop)
        cache = softmax.append(before, piece, at, None)
    begins = jnp.broadcast_to(first, slots.shape)
    y = softmax.attend_cached(q, cache, to_jax(slots), begins)
    is_seen, bar = is_seen[..., None], 2e-5 * np.abs(want).max()
    np.testing.assert_allclose(np.where(is_seen, y, 0), np.where(is_seen, want, 0), atol=bar)
    y, after = softmax.step_cached(q[:, :, -1:], piece, before, at, begins[:, -1:])
    np.testing.assert_allclose(y, want[:, :, -1:], atol=bar)
    jax.tree.map(np.testing.assert_array_equal, after, cache)


def test_a_cache_keeps_tokens_that_are_valid_and_fit_into_it(rng):
    k, v = (np.float32(rng.standard_normal((1, H, 4, K))) for _ in range(2))
    slots, valid = np.array([[1, 0, 2, 5]]), np.array([[True, True, False, True]])
    cache = softmax.init_cache(1, H, 3, K, K, jnp.float32)
    for given, kept in ((valid, [1, 0]), (None, [1, 0, 2])):
        after = softmax.append(cache, softmax.KVCache(to_jax(k), to_jax(v)), to_jax(slots), to_jax(given))
        for got, tokens in zip(after[:2], (k, v), strict=True):
            want = np.zeros((1, H, 3, K), np.float32)
            want[:, :, kept] = tokens[:, :, : len(kept)]
            np.testing.assert_array_equal(got, want)


def test_a_step_adds_up_a_cache_of_bfloat16_in_float32():
    """1 and the next number of bfloat16, each twice, are all that is seen: their mean is between these."""
    ulp = 2.0**-7
    values = np.array([1, 1 + ulp, 1, 0], np.float32)[:, None] * np.ones((1, H, 1, K), np.float32)
    zeros = jnp.zeros((1, H, 1, K))
    cache = softmax.KVCache(jnp.zeros((1, H, 4, K), jnp.bfloat16), jnp.asarray(values, jnp.bfloat16))
    token = softmax.KVCache(zeros, jnp.full(zeros.shape, 1 + ulp, jnp.bfloat16))
    y, _ = softmax.step_cached(zeros, token, cache, jnp.array([[3]]), jnp.array([[0]]))
    np.testing.assert_allclose(y, 1 + ulp / 2, rtol=1e-6)


def test_a_query_that_is_not_finite_stays_out_of_the_cache(rng):
    cache = softmax.init_cache(1, 2, 4, K, K, jnp.float32)
    k, v = (jnp.asarray(rng.standard_normal((1, 2, 1, K)), jnp.float32) for _ in range(2))
    at = jnp.zeros((1, 1), jnp.int32)
    y, after = softmax.step_cached(jnp.full((1, 2, 1, K), jnp.nan), softmax.KVCache(k, v, None), cache, at, at)
    assert np.isnan(y).all()
    np.testing.assert_array_equal(after.k[:, :, :1], k)
    np.testing.assert_array_equal(after.v[:, :, :1], v)
