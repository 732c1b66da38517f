"""Memory of every kind of attention: linear in T, and a few rows' temporaries beside the inputs and outputs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import heinsen
from heinsen.models.config import REMAT_POLICIES
from heinsen.ops import sigmoid
from heinsen.ops.delta import delta_rule
from heinsen.ops.softmax import softmax_attention
from tests.ops.common import user_jit

HEADS, FEATURES = 24, 32  # as many as in the 125M model


def temporary_bytes(function, *shapes, jit=jax.jit):
    arrays = (jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)
    return jit(function).lower(*arrays).compile().memory_analysis().temp_size_in_bytes


def with_gradients(attend):
    return lambda q, k, v, g: jax.vjp(attend, q, k, v)[1](g)


def of_model(name, n_tokens, gradient, **options):
    attend = functools.partial(getattr(heinsen, name), implementation="chunked", **options)
    run = with_gradients(attend) if gradient else lambda q, k, v, g: attend(q, k, v)
    return temporary_bytes(run, *[(1, HEADS, n_tokens, FEATURES)] * 4, jit=user_jit)


@pytest.mark.parametrize("name", ["log_attention", pytest.param("attention", marks=pytest.mark.long)])
def test_memory_is_linear_in_tokens_with_few_buffers(name):
    n_tokens = 65536
    # A row at a time: its queries, keys, values, sums before its chunks, and the gradients of all these.
    assert of_model(name, n_tokens, gradient=True) <= 1.5 * (4 * HEADS * n_tokens * FEATURES)


@pytest.mark.long
@pytest.mark.parametrize("name", ["log_attention", "attention"])
def test_both_ways_within_documents_need_hardly_more_than_both_directions(name):
    """Both directions are rows of one call: their inputs and outputs are twice as large, their temporaries are not."""
    n_tokens = 16384
    ids = jnp.arange(n_tokens) // 1000
    causal, both_ways = (of_model(name, n_tokens, True, causal=x, segment_ids=ids) for x in (True, False))
    arrays = 4 * HEADS * n_tokens * FEATURES
    assert causal < both_ways <= causal + 14 * arrays  # two of q, k, values, y and their gradients, less what is given


@pytest.mark.long
@pytest.mark.parametrize("name", ["log_attention", "attention"])
def test_without_gradients_temporaries_are_those_of_one_row_of_all(name):
    n_tokens = 16384
    # The pairs of blocks of 8 tokens are as large as 8 inputs, and 14 more are there at the same time at most.
    assert of_model(name, n_tokens, gradient=False) <= (8 + 14) * (4 * n_tokens * FEATURES)


def test_memory_of_the_delta_rule_is_linear_in_tokens():
    loss = lambda *arrays: jnp.sum(delta_rule(*arrays, log_decay=-arrays[-1])[0])
    shapes = lambda n: [(2, n, 32)] * 3 + [(2, n)]
    short, long = (temporary_bytes(jax.grad(loss, argnums=range(4)), *shapes(n)) for n in (2048, 4096))
    assert long < 2.1 * short


@pytest.mark.parametrize("gradient", [False, True])
def test_memory_of_sigmoid_attention_is_linear_in_tokens_without_copies_in_loops(gradient):
    attend, sizes = heinsen.sigmoid_attention, (16384, 65536)
    run = with_gradients(attend) if gradient else lambda q, k, v, g: attend(q, k, v)
    arrays = [[jax.ShapeDtypeStruct((2, n, 8), "float32")] * 4 for n in sizes]
    programs = [jax.jit(run).lower(*each).compile() for each in arrays]
    grown = np.subtract(*(program.memory_analysis().temp_size_in_bytes for program in programs[::-1]))
    assert grown <= (4 if gradient else 2) * 4 * 2 * 8 * (sizes[1] - sizes[0])
    loops, shape = programs[1].as_text().split("\nENTRY ")[0].splitlines(), f"f32[2,{sizes[1]},8]"
    assert any(shape in line for line in loops)
    assert not [line for line in loops if shape in line.split(" copy(")[0] and " copy(" in line]


def test_blocks_of_sigmoid_attention_hold_a_bounded_number_of_pairs():
    size = sigmoid._block_size
    assert size(1) == sigmoid._LARGEST_BLOCK > size(24) > size(10**6) == sigmoid._SMALLEST_BLOCK
    assert all(n * size(n) ** 2 <= sigmoid._PAIRS for n in range(1, 500))


def test_blocks_of_softmax_attention_are_few_however_long_the_sequence():
    """Each block is compiled by itself."""
    shape = jax.ShapeDtypeStruct((1, 1, 100_000, 4), np.float32)
    text = str(jax.make_jaxpr(softmax_attention)(shape, shape, shape))
    assert text.count("dot_general[") == 2 * 16


def test_no_policy_of_remat_keeps_the_scores_of_softmax_attention():
    def temporary(policy):
        attend = jax.checkpoint(lambda q, k, v: softmax_attention(q, k, v).sum(), policy=REMAT_POLICIES[policy])
        return temporary_bytes(jax.grad(attend, argnums=(0, 1, 2)), *[(1, 4, 1024, 8)] * 3)

    scores = 4 * 4 * 1024**2
    assert temporary("dots") < 1.1 * temporary("full") < scores / 2
