"""Annotations, array shapes included, are enforced while the tests run (conftest.py)."""

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

import heinsen
from heinsen import logspace

T, K, V = 5, 3, 4
q, k, log_v = jnp.zeros((2, T, K)), jnp.zeros((2, T, K)), jnp.zeros((2, T, V))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((q, k[..., 1:], log_v), "k"),  # another number of key features
        ((q, k, log_v[:, 1:]), "log_v"),  # another number of tokens
        ((q, k, log_v[:1]), "log_v"),  # other leading axes
        ((q[0, 0], k, log_v), "q"),  # an axis too few
        ((q, k.astype(jnp.int32), log_v), "k"),  # another dtype
        ((q, k, np.asarray(log_v)), "log_v"),  # another kind of array
    ],
)
def test_a_wrong_shape_in_a_public_call_is_a_type_error(arguments, name):
    assert heinsen.log_attention(q, k, log_v).shape == (2, T, V)
    with pytest.raises(TypeCheckError, match=rf"parameters of heinsen\S*\.log_attention(.|\n)*parameter '{name}'"):
        heinsen.log_attention(*arguments)


def test_shapes_of_functions_and_states_below_are_checked():
    assert logspace.log_matmul(jnp.zeros((2, 3, 4)), jnp.zeros((4, 5))).shape == (2, 3, 5)
    with pytest.raises(TypeCheckError, match="log_matmul"):
        logspace.log_matmul(jnp.zeros((2, 3, 4)), jnp.zeros((3, 5)))
    state = heinsen.init_state((2,), K, V)
    assert heinsen.query_state(state, q).shape == (2, T, V)
    with pytest.raises(TypeCheckError, match="query_state"):
        heinsen.query_state((state.h_s, state.h_z), q)


@pytest.mark.wrong_types
def test_without_the_checks_the_function_itself_names_the_error():
    with pytest.raises(ValueError, match="q and k differ in their last axis"):
        heinsen.log_attention(q, k[..., 1:], log_v)
