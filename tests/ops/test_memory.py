"""Memory of the chunked form: linear in T, few buffers of the inputs' size, and no copies of them in its loops."""

import functools

import jax
import pytest

import heinsen
from heinsen.ops import exact
from tests.ops.common import user_jit

HEADS, FEATURES = 24, 32  # as many as in the 125M model


def compile_for(function, n_tokens, gradient, **options):
    attend = functools.partial(getattr(heinsen, function), implementation="chunked", **options)
    x = jax.ShapeDtypeStruct((1, HEADS, n_tokens, FEATURES), "float32")
    run = lambda q, k, v, g: jax.vjp(attend, q, k, v)[1](g) if gradient else attend(q, k, v)
    return user_jit(run).lower(x, x, x, x).compile()


@pytest.mark.parametrize("function", ["log_attention", pytest.param("attention", marks=pytest.mark.long)])
def test_memory_is_linear_in_tokens_with_few_buffers_and_no_copies_in_loops(function):
    n_tokens = 65536
    compiled = compile_for(function, n_tokens, gradient=True)
    input_bytes = 4 * HEADS * n_tokens * FEATURES
    # S, and states of K V numbers for each chunk, of the inputs' size here: once kept, once for the exact form.
    assert compiled.memory_analysis().temp_size_in_bytes <= 4 * input_bytes
    # What a loop copies it copies once per group: time would grow with the square of T.
    loops = compiled.as_text().split("\nENTRY ")[0].splitlines()
    shape = f"f32[1,{HEADS},{n_tokens},{FEATURES}]"
    assert any(shape in line for line in loops)
    assert not [line for line in loops if shape in line.split(" copy(")[0] and " copy(" in line]


@pytest.mark.long
@pytest.mark.parametrize("function", ["log_attention", "attention"])
def test_both_ways_within_documents_need_hardly_more_memory_than_causal_attention(function):
    n_tokens = 16384
    ids = jax.numpy.arange(n_tokens) // 1000
    compiled = [compile_for(function, n_tokens, True, causal=causal, segment_ids=ids) for causal in (True, False)]
    causal, both_ways = (each.memory_analysis().temp_size_in_bytes for each in compiled)
    assert causal < both_ways <= 1.3 * causal
    loops = compiled[1].as_text().split("\nENTRY ")[0].splitlines()
    sizes = f"[1,{HEADS},{n_tokens},{FEATURES}]", f",1,{HEADS},8,{FEATURES},{FEATURES}]"
    copied = [line.split(" copy(")[0] for line in loops if " copy(" in line]
    assert not [shape for shape in copied if any(size in shape for size in sizes)]


@pytest.mark.long
@pytest.mark.parametrize("function", ["log_attention", "attention"])
def test_without_gradients_only_the_output_grows_and_a_few_rows_in_logarithms(function):
    temporary = [compile_for(function, n, gradient=False).memory_analysis().temp_size_in_bytes for n in (4096, 16384)]
    n_rows = 5.1 * exact.MAX_ROWS if function == "log_attention" else 0  # q, k, log v and log y of those, and a copy
    assert temporary[1] - temporary[0] <= (0.05 * HEADS + n_rows) * 4 * (16384 - 4096) * FEATURES
