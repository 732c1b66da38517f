"""Laws of the attention that hold for all inputs, searched for exceptions by hypothesis."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import heinsen
from heinsen.ops import chunked
from tests.ops.common import SMALL_SPLIT

T, K, V = 13, 3, 2
search = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def inputs(draw):
    """(q, k, log_v) [T, features] of any dynamic range, with masked keys and zero values."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sigma = st.sampled_from([0.0, 0.1, 1.0, 8.0, 64.0])
    q, k, log_v = (draw(sigma) * rng.standard_normal((T, n)) for n in (K, K, V))
    k[1:][rng.random((T - 1, K)) < draw(st.sampled_from([0, 0, 0.3]))] = -np.inf
    log_v[rng.random((T, V)) < draw(st.sampled_from([0, 0, 0.3]))] = -np.inf
    k += draw(st.sampled_from([0.0, -200.0, 200.0])) * (np.arange(T) == draw(st.integers(1, T - 1)))[:, None]
    return tuple(x.astype(np.float32) for x in (q, k, log_v))


@functools.partial(jax.jit, static_argnums=3)
def _attend(q, k, log_v, split):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "choose_split", lambda shape: split)
        return heinsen.log_attention(q, k, log_v, implementation="chunked", return_state=True)


def attend(q, k, log_v, split=SMALL_SPLIT):
    return jax.tree.map(np.asarray, _attend(q, k, log_v, split))


def same(a, b, tolerance=2e-4):
    """Equal to within float32's rounding of logarithms of some hundred."""
    a, b = np.asarray(a), np.asarray(b)
    np.testing.assert_array_equal(np.isneginf(a), np.isneginf(b))
    finite = np.isfinite(a)
    np.testing.assert_allclose(a[finite], b[finite], rtol=2e-6, atol=tolerance)


@search
@given(inputs(), st.sampled_from([(1, 1, None), (6, 2, 1), (16, 4, None)]))
def test_the_size_of_blocks_and_chunks_changes_nothing(arrays, sizes):
    jax.tree.map(same, attend(*arrays, chunked.Split(*sizes)), attend(*arrays))


@search
@given(inputs(), st.integers(1, T - 1), st.floats(-50, 50), st.integers(0, 2))
def test_no_output_depends_on_later_tokens(arrays, t, change, which):
    changed = [x.copy() for x in arrays]
    changed[which][t:] += np.float32(change)
    same(attend(*changed)[0][:t], attend(*arrays)[0][:t])


@search
@given(inputs(), st.floats(-20, 20))
def test_shifts_of_queries_keys_and_values(arrays, c):
    q, k, log_v = arrays
    c = np.float32(round(c))  # sums with small whole numbers are rounded little
    y, state = attend(q, k, log_v)
    same(attend(q + c, k, log_v)[0], y, 4e-4)
    shifted_y, shifted = attend(q, k + c, log_v)
    same(shifted_y, y, 4e-4)
    same(shifted.h_z, state.h_z + c)
    same(attend(q, k, log_v + c)[0], y + c, 4e-4)


@search
@given(inputs(), st.permutations(range(T - 1)))
def test_the_order_of_past_tokens_does_not_matter(arrays, order):
    q, k, log_v = arrays
    order = [*order, T - 1]
    y, state = attend(q, k, log_v)
    permuted_y, permuted = attend(q, k[order], log_v[order])
    same(permuted_y[-1], y[-1])
    jax.tree.map(same, permuted, state)


@pytest.mark.parametrize("split", [4, *(pytest.param(split, marks=pytest.mark.long) for split in (1, 9))])
def test_a_state_handed_on_at_any_split(split):
    @jax.jit
    def in_two(q, k, log_v):
        call = functools.partial(heinsen.log_attention, implementation="chunked", return_state=True)
        first, state = call(q[:split], k[:split], log_v[:split])
        second, state = call(q[split:], k[split:], log_v[split:], state=state)
        return jax.numpy.concatenate([first, second]), state

    @search
    @given(inputs())
    def law(arrays):
        jax.tree.map(same, jax.tree.map(np.asarray, in_two(*arrays)), attend(*arrays))

    law()


@search
@given(inputs(), inputs(), inputs())
def test_states_merge_associatively_and_commutatively(a, b, c):
    a, b, c = (jax.tree.map(jnp.asarray, attend(*arrays)[1]) for arrays in (a, b, c))
    merge = heinsen.merge_states
    jax.tree.map(same, merge(merge(a, b), c), merge(a, merge(c, b)))
    jax.tree.map(same, merge(a, heinsen.init_state((), K, V)), a)


@search
@given(inputs())
def test_outputs_lie_between_the_visible_values(arrays):
    y = attend(*arrays)[0]
    _, k, log_v = arrays
    seen = np.max(k, axis=-1, keepdims=True) > -np.inf  # a token whose keys are all masked is not there
    lowest = np.minimum.accumulate(np.where(seen, log_v, np.inf), axis=0)
    highest = np.maximum.accumulate(np.where(seen, log_v, -np.inf), axis=0)
    rounding = 2e-4
    assert np.all(y >= lowest - rounding) and np.all(y <= highest + rounding)
