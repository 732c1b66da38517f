"""Softmax attention to the last tokens: against the quadratic form in float64, in blocks, pieces and steps."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen.ops import window
from tests.ops.test_softmax import by_pairs

B, H, T, K, W = 2, 3, 23, 4, 5
QUICK = dict(static_argnums=3)
window_attention = jax.jit(window.window_attention, **QUICK)


@pytest.fixture
def small_blocks(monkeypatch):
    """Four blocks, of which the last is a part of one."""
    monkeypatch.setattr(window, "_SMALLEST_BLOCK", 4)
    monkeypatch.setattr(window, "_SCORES_CPU", 7 * W * 2 * W)  # which divides B H 5 blocks unevenly


def draw(rng):
    """Queries, keys, values and slopes; documents, one of which began before the first token."""
    arrays = (np.float32(scale * rng.standard_normal((B, H, T, K))) for scale in (3, 3, 1, 1))
    return *arrays, rng.random((B, T)) < [[0.0], [0.2]]


def first_of(begins, slots):
    return jnp.asarray(np.maximum.accumulate(np.where(begins, slots, 0), axis=1), jnp.int32)


def seen(begins, causal=True):
    t, ids = np.arange(T), np.cumsum(begins, axis=1)
    near = np.abs(t[:, None] - t) < W
    return ((ids[:, :, None] == ids[:, None]) & near & (np.tril(near) if causal else True))[:, None]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.usefixtures("small_blocks")
def test_blocks_of_queries_equal_all_pairs(rng, causal):
    q, k, v, slopes, begins = draw(rng)
    slots = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))

    @jax.jit
    def run(q, k, v):
        if causal:
            attend = lambda q, k, v: window.window_attention(q, k, v, W, None, slots, first_of(begins, slots))
        else:
            ids = jnp.asarray(np.cumsum(begins, axis=1)[:, None])
            attend = lambda q, k, v: window.window_attention_both_ways(q, k, v, W, ids)
        y, back = jax.vjp(attend, q, k, v)
        return y, back(slopes)

    wanted = jax.tree.leaves(by_pairs(q, k, v, seen(begins, causal), slopes))
    for got, want in zip(jax.tree.leaves(run(q, k, v)), wanted, strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())


@pytest.mark.usefixtures("small_blocks")
def test_ragged_pieces_and_steps_equal_the_whole(rng):
    """Rows of different lengths, pieces shorter and longer than the ring, then token by token."""
    q, k, v, _, begins = draw(rng)
    wanted, _ = by_pairs(q, k, v, seen(begins), np.zeros_like(v))
    ring = window.init_ring(B, H, W, K, K, jnp.float32)
    n_seen, append = np.zeros(B, int), jax.jit(window.append_ring)
    for size in (11, 1, 3):
        lengths = rng.permutation([size, int(rng.integers(0, size + 1))])
        slots = n_seen[:, None] + np.arange(size)
        valid = np.arange(size) < lengths[:, None]
        take = lambda x, slots=slots: np.take_along_axis(x, slots[:, None, :, None], axis=2)
        first = np.take_along_axis(np.asarray(first_of(begins, np.arange(T))), slots, axis=1)
        arrays = [jnp.where(valid[:, None, :, None], take(x), 99.0) for x in (q, k, v)]
        slots = jnp.asarray(slots, jnp.int32)
        y = window_attention(*arrays, W, ring, slots, jnp.asarray(first))
        ring = append(ring, *arrays[1:], slots, jnp.asarray(valid))
        np.testing.assert_allclose(*(np.where(valid[:, None, :, None], x, 0) for x in (y, take(wanted))), atol=2e-5)
        n_seen = n_seen + lengths
    step = jax.jit(window.step_window)
    for _ in range(T - n_seen.max()):
        at = n_seen[:, None, None, None]
        first = np.take_along_axis(np.asarray(first_of(begins, np.arange(T))), n_seen[:, None], axis=1)
        arrays = [jnp.asarray(np.take_along_axis(x, at, axis=2)) for x in (q, k, v)]
        y, ring = step(*arrays, ring, jnp.asarray(n_seen[:, None], jnp.int32), jnp.asarray(first))
        np.testing.assert_allclose(y, np.take_along_axis(wanted, at, axis=2), atol=2e-5)
        n_seen = n_seen + 1
    for row in range(B):  # the last W tokens, each in its place
        last = np.arange(n_seen[row] - W, n_seen[row])
        np.testing.assert_array_equal(ring.k[row][:, last % W], k[row][:, last])


def test_no_array_is_empty():
    """Empty residuals would be inputs of a `jax.shard_map`, which crash XLA of jaxlib 0.11.2."""
    ring, slots = window.init_ring(B, H, W, K, K, jnp.float32), jnp.broadcast_to(jnp.arange(T), (B, T))
    attend = lambda q: jnp.sum(window.window_attention(q, q, q, W, ring, slots, slots))
    assert not re.findall(r"\w+\[(?:\d+,)*0(?:,\d+)*\]", str(jax.make_jaxpr(jax.grad(attend))(jnp.ones((B, H, T, K)))))


def test_memory_grows_as_the_tokens_whatever_remat_saves():
    def temporary(n_tokens):
        shape = jax.ShapeDtypeStruct((1, 2, n_tokens, 8), np.float32)
        slots = jnp.arange(n_tokens, dtype=jnp.int32)[None]
        attend = lambda q, k, v: window.window_attention(q, k, v, 64, None, slots, 0 * slots).sum()
        compiled = jax.jit(jax.grad(attend, argnums=(0, 1, 2))).lower(shape, shape, shape).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(4096) < 2.3 * temporary(2048) < 4 * 2048**2, "less than one head's pairs of tokens"
