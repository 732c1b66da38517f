"""Memory of the chunked form: linear in T, and a few rows' temporaries beside the inputs and outputs."""

import functools

import jax
import pytest

import heinsen
from tests.ops.common import user_jit

HEADS, FEATURES = 24, 32  # as many as in the 125M model


def temporary_bytes(function, n_tokens, gradient, **options):
    attend = functools.partial(getattr(heinsen, function), implementation="chunked", **options)
    x = jax.ShapeDtypeStruct((1, HEADS, n_tokens, FEATURES), "float32")
    run = lambda q, k, v, g: jax.vjp(attend, q, k, v)[1](g) if gradient else attend(q, k, v)
    return user_jit(run).lower(x, x, x, x).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("function", ["log_attention", pytest.param("attention", marks=pytest.mark.long)])
def test_memory_is_linear_in_tokens_with_few_buffers(function):
    n_tokens = 65536
    # A row at a time: its queries, keys, values, sums before its chunks, and the gradients of all these.
    assert temporary_bytes(function, n_tokens, gradient=True) <= 1.5 * (4 * HEADS * n_tokens * FEATURES)


@pytest.mark.long
@pytest.mark.parametrize("function", ["log_attention", "attention"])
def test_both_ways_within_documents_need_hardly_more_than_both_directions(function):
    """Both directions are rows of one call: their inputs and outputs are twice as large, their temporaries are not."""
    n_tokens = 16384
    ids = jax.numpy.arange(n_tokens) // 1000
    causal, both_ways = (temporary_bytes(function, n_tokens, True, causal=x, segment_ids=ids) for x in (True, False))
    arrays = 4 * HEADS * n_tokens * FEATURES
    assert causal < both_ways <= causal + 14 * arrays  # two of q, k, values, y and their gradients, less what is given


@pytest.mark.long
@pytest.mark.parametrize("function", ["log_attention", "attention"])
def test_without_gradients_a_few_rows_are_all_that_grows(function):
    small, large = (temporary_bytes(function, n, gradient=False) for n in (4096, 16384))
    rows = 2 if function == "log_attention" else 1  # logarithms take as much again
    per_row = 4 * (16384 - 4096) * FEATURES
    assert large - small <= 12 * rows * per_row
