"""Softmax attention of whole sequences, as it is computed on a CPU: against the quadratic form in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen.models.config import REMAT_POLICIES
from heinsen.ops import softmax
from tests.arrays import to_jax

B, H, K = 2, 3, 4


def by_pairs(q, k, v, log_decay, sees, slopes):
    """y, and the gradients of sum(slopes y) by q, k, v and log_decay, in float64."""
    q, k, v, log_decay, slopes = map(np.float64, (q, k, v, log_decay, slopes))
    n = q.shape[-2]
    between = [[[s < u <= t for u in range(n)] for s in range(n)] for t in range(n)]
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(K) + np.einsum("tsu,bhu->bhts", between, log_decay)
    scores = np.where(sees, scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    of_p = slopes @ v.swapaxes(-1, -2)
    of_scores = p * (of_p - (p * of_p).sum(-1, keepdims=True))
    of_decay = np.einsum("tsu,bhts->bhu", between, of_scores)
    of_q, of_k = of_scores @ k / np.sqrt(K), of_scores.swapaxes(-1, -2) @ q / np.sqrt(K)
    return p @ v, (of_q, of_k, p.swapaxes(-1, -2) @ slopes, of_decay)


def draw(rng, n_tokens):
    q, k, v, slopes = (np.float32(scale * rng.standard_normal((B, H, n_tokens, K))) for scale in (3, 3, 1, 1))
    return q, k, v, np.float32(-rng.exponential(1, (B, H, n_tokens))), slopes


@pytest.mark.parametrize("backend", ["cpu", "tpu"])
@pytest.mark.parametrize("mode", ["causal", "gate", "bidirectional"])
@pytest.mark.parametrize("documents", [True, False])
def test_whole_sequences_equal_all_pairs(rng, monkeypatch, mode, documents, backend):
    monkeypatch.setattr(softmax.backend, "current", lambda: backend)
    monkeypatch.setattr(softmax, "_SMALLEST_BLOCK", 8)
    n_tokens = 37  # the last block is a part of one
    causal, (q, k, v, log_decay, slopes) = mode != "bidirectional", draw(rng, n_tokens)
    ids = np.cumsum(rng.random((B, 1, n_tokens)) < 0.2, axis=-1) if documents else None
    sees = np.tril(np.ones((n_tokens, n_tokens), bool)) if causal else True
    if documents:
        sees = sees & (ids[..., :, None] == ids[..., None, :])

    given = (q, k, v, log_decay) if mode == "gate" else (q, k, v)

    @jax.jit
    def run(*given):
        attend = lambda q, k, v, *gate: softmax.softmax_attention(q, k, v, to_jax(ids), causal, *gate)
        y, back = jax.vjp(attend, *given)
        return y, *back(slopes)

    y, gradients = by_pairs(q, k, v, log_decay if mode == "gate" else 0 * log_decay, sees, slopes)
    for got, want in zip(run(*given), (y, *gradients[: len(given)]), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())


def test_a_cache_with_a_gate_equals_all_pairs(rng):
    """Read at once, and by a step, both of documents that begin in some slot, at slots that differ by row."""
    n_tokens = 23
    q, k, v, log_decay, slopes = draw(rng, n_tokens)
    slots, first = np.arange(n_tokens) + [[0], [5]], np.array([[2], [9]])
    sees = (slots[:, None, :, None] >= slots[:, None, None]) & (slots >= first)[:, None, None]
    want, _ = by_pairs(q, k, v, log_decay, sees | np.eye(n_tokens, dtype=bool), slopes)
    cache = softmax.init_cache(B, H, 30, K, K, jnp.float32)._replace(decayed=jnp.zeros((B, H, 30, 1)))

    def cut(cache, start, stop):
        *piece, decays = (to_jax(x[:, :, start:stop]) for x in (k, v, log_decay))
        at = to_jax(slots[:, start:stop])
        return softmax.KVCache(*piece, softmax.sum_decays(cache, decays, at)), at

    for start, stop in ((0, 9), (9, n_tokens - 1), (n_tokens - 1, n_tokens)):
        before, (piece, at) = cache, cut(cache, start, stop)
        cache = softmax.append(before, piece, at, None)
    begins = jnp.broadcast_to(first, slots.shape)
    y = softmax.attend_cached(to_jax(q), cache, to_jax(slots), begins)
    seen = np.broadcast_to((slots >= first)[:, None, :, None], y.shape)
    np.testing.assert_allclose(np.where(seen, y, 0), np.where(seen, want, 0), atol=2e-5 * np.abs(want).max())
    y, after = softmax.step_cached(to_jax(q[:, :, -1:]), piece, before, at, begins[:, -1:])
    np.testing.assert_allclose(y, want[:, :, -1:], atol=2e-5 * np.abs(want).max())
    jax.tree.map(np.testing.assert_array_equal, after, cache)


def test_blocks_are_few_however_long_the_sequence():
    """Each block is compiled by itself."""
    shape = jax.ShapeDtypeStruct((1, 1, 100_000, 4), np.float32)
    text = str(jax.make_jaxpr(softmax.softmax_attention)(shape, shape, shape))
    assert text.count("dot_general[") == 2 * 16


def test_no_policy_of_remat_keeps_the_scores():
    shape = jax.ShapeDtypeStruct((1, 4, 1024, 8), np.float32)

    def temporary(policy):
        attend = jax.checkpoint(lambda q, k, v: softmax.softmax_attention(q, k, v).sum(), policy=REMAT_POLICIES[policy])
        compiled = jax.jit(jax.grad(attend, argnums=(0, 1, 2))).lower(shape, shape, shape).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    scores = 4 * 4 * 1024**2
    assert temporary("dots") < 1.1 * temporary("full") < scores / 2


def test_a_cache_keeps_tokens_that_are_valid_and_fit_into_it(rng):
    k, v = (np.float32(rng.standard_normal((1, H, 4, K))) for _ in range(2))
    slots, valid = np.array([[1, 0, 2, 5]]), np.array([[True, True, False, True]])
    cache = softmax.init_cache(1, H, 3, K, K, jnp.float32)
    for given, kept in ((valid, [1, 0]), (None, [1, 0, 2])):
        tokens = softmax.KVCache(to_jax(k), to_jax(v))
        after = softmax.append(cache, tokens, to_jax(slots), None if given is None else jnp.asarray(given))
        for got, tokens in zip(after[:2], (k, v), strict=True):
            want = np.zeros((1, H, 3, K), np.float32)
            want[:, :, kept] = tokens[:, :, : len(kept)]
            np.testing.assert_array_equal(got, want)


def test_a_step_adds_up_a_cache_of_bfloat16_in_float32():
    """1 and the next number of bfloat16, each twice, are all that is seen: their mean is between these."""
    ulp = 2.0**-7
    values = np.array([1, 1 + ulp, 1, 0], np.float32)[:, None] * np.ones((1, H, 1, K), np.float32)
    zeros = np.zeros((1, H, 1, K), np.float32)
    cache = softmax.KVCache(jnp.zeros((1, H, 4, K), jnp.bfloat16), jnp.asarray(values, jnp.bfloat16))
    slot, first = jnp.array([[3]]), jnp.array([[0]])
    q, own = jnp.asarray(zeros), jnp.full(zeros.shape, 1 + ulp, jnp.bfloat16)
    y, _ = softmax.step_cached(q, softmax.KVCache(q, own), cache, slot, first)
    np.testing.assert_allclose(y, 1 + ulp / 2, rtol=1e-6)
