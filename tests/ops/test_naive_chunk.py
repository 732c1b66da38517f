"""The chunked form on one page: against float64, and as an oracle of the fast one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import heinsen
from heinsen.ops import naive_chunk, schedule
from heinsen.ops.values import SMALLEST_SUM
from tests.ops.common import run_fast_form
from tests.ops.truth import assert_close, assert_gradients_close, draw_case, truth

naive = functools.partial(naive_chunk.log_attention, chunk_size=4)


@pytest.fixture
def small_chunks(monkeypatch):
    """The fast form in chunks of 4, two in a group, as the naive form takes them."""
    monkeypatch.setattr(schedule, "choose_chunk_size", lambda d_key: 4)
    monkeypatch.setattr(schedule, "chunks_per_group", lambda elements: 2)


@functools.partial(jax.jit, static_argnums=0)
def with_grads(function, arrays, cotangents):
    out, vjp = jax.vjp(function, *arrays)
    return out, vjp(cotangents)


def test_one_page_is_the_truth_with_its_gradients_by_jax(rng):
    case = draw_case(rng, batch=(2,), n_queries=14, d_key=3, d_value=5)
    case = case._replace(log_decay=-rng.random((2, 14)).astype(np.float32))
    cotangents = tuple(rng.standard_normal(shape).astype(np.float32) for shape in ((2, 14, 5), (2, 3, 5), (2, 3)))
    expected = truth(case, signed=False, cotangents=cotangents)
    run = lambda q, k, log_v, g: (lambda y, state: (y, *state))(*naive(q, k, log_v, log_decay=g))
    (y, *state), grads = with_grads(run, (case.q, case.k, case.values, case.log_decay), cotangents)
    assert_close(y, expected.y, what="log y")
    for got, want in zip(state, expected.state, strict=True):
        assert_close(got, want, what="state")
    assert_gradients_close(grads, expected.gradients[:4], case, signed=False)


@pytest.mark.long
@pytest.mark.parametrize("gated", [False, True])
def test_the_fast_form_is_the_naive_one_with_its_gradients(rng, small_chunks, gated):
    arrays = tuple(jnp.asarray(2 * rng.standard_normal((3, 22, n)), jnp.float32) for n in (4, 4, 6))
    arrays = (*arrays, jnp.asarray(-rng.random((3, 22)), jnp.float32) if gated else None)
    attend = functools.partial(heinsen.log_attention, implementation="chunked", return_state=True)
    slow, fast = (lambda q, k, log_v, g, f=f: f(q, k, log_v, log_decay=g) for f in (naive, attend))
    out = jax.jit(slow)(*arrays)
    cotangents = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), out)
    (want, want_grads), (got, got_grads) = (with_grads(f, arrays, cotangents) for f in (slow, fast))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5), got, want)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), got_grads, want_grads)


def test_wide_exponents_lose_terms_in_the_naive_form_and_are_exact_in_the_default_one(rng, small_chunks):
    arrays = tuple(jnp.asarray(64 * rng.standard_normal((40, 4)), jnp.float32) for _ in range(3))
    exact = jax.jit(functools.partial(heinsen.log_attention, implementation="reference"))(*arrays)
    for lossy in (jax.jit(naive)(*arrays)[0], jax.jit(run_fast_form)(*arrays)[0]):
        assert not np.allclose(lossy, exact, atol=1.0)
    chunked = functools.partial(heinsen.log_attention, implementation="chunked")
    np.testing.assert_allclose(jax.jit(chunked)(*arrays), exact, rtol=1e-5, atol=2e-4)


def test_sums_above_the_limit_are_right_to_rounding():
    """Terms below float32's smallest normal number are lost; so many of them weigh nothing beside SMALLEST_SUM."""
    smallest_normal, n_terms = float(np.finfo(np.float32).tiny), 64 * 128
    assert n_terms * smallest_normal / SMALLEST_SUM < np.finfo(np.float32).eps
