"""Sigmoid attention: its quadratic form in float64, the laws of its scaling, its memory, and what it refuses."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import heinsen
from heinsen.ops import sigmoid
from tests.arrays import takes_numpy
from tests.ops.truth import assert_close, document_numbers, draw_case

sigmoid_attention = takes_numpy(heinsen.sigmoid_attention)
sigmoid_attention_cached = takes_numpy(heinsen.sigmoid_attention_cached)

T, K, V = 11, 4, 3
BLOCK = 4  # which does not divide T


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(sigmoid, "_LARGEST_BLOCK", BLOCK)
    monkeypatch.setattr(sigmoid, "_SMALLEST_BLOCK", BLOCK)
    assert T > 2 * BLOCK and T % BLOCK


# ---- the quadratic form ----------------------------------------------------------------------------


def seen_by(n_queries, n_keys, causal, ids):
    """[*batch, T, S]: 1 where a query sees a key."""
    seen = np.tril(np.ones((n_queries, n_keys))) if causal else np.ones((n_queries, n_keys))
    if ids is None:
        return seen
    documents = np.apply_along_axis(document_numbers, -1, ids)
    return seen * (documents[..., :, None] == documents[..., None, :])


def truth(q, k, v, seen, alpha, bias, g=None):
    """y in float64, and the gradients by q, k and v if there is a cotangent; every logit at once."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    n = np.maximum(seen.sum(-1, keepdims=True), 1)
    x = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]) + (-np.log(n) if bias == "-log_n" else bias)
    weights = seen * n**-alpha / (1 + np.exp(np.minimum(-x, 700)))
    if g is None:
        return weights @ v
    dx = weights * (1 / (1 + np.exp(np.minimum(x, 700)))) * (g @ v.swapaxes(-1, -2)) / np.sqrt(q.shape[-1])
    return weights @ v, (dx @ k, dx.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ g)


def output_and_gradients(function, *arrays):
    """(y, gradients by q, k and v) for the cotangent that comes last."""

    def run(q, k, v, g):
        y, pull = jax.vjp(function, q, k, v)
        return y, pull(g.astype(y.dtype))

    return jax.jit(run)(*arrays)


@pytest.mark.parametrize(
    "causal, n_queries, mean_length, alpha, bias",
    [
        (True, T, 0, 1.0, 0.0),
        (True, T, 4, 0.5, "-log_n"),
        (False, T, 4, 1.5, -1.25),
        (False, BLOCK + 2, 0, 0.0, "-log_n"),
    ],
)
def test_outputs_and_gradients_are_those_of_the_quadratic_form(
    causal, n_queries, mean_length, alpha, bias, rng, small_blocks
):
    case = draw_case(rng, (2, 3), n_queries, T, K, V, causal, mean_length=mean_length)
    g = rng.standard_normal((2, 3, n_queries, V)).astype(np.float32)
    seen = seen_by(n_queries, T, causal, case.segment_ids)
    want, want_gradients = truth(*case[:3], seen, alpha, bias, g)
    attend = functools.partial(sigmoid_attention, causal=causal, alpha=alpha, bias=bias, segment_ids=case.segment_ids)
    y, gradients = output_and_gradients(attend, *case[:3], g)
    assert_close(y, want, 1e-6)
    for name, got, expected in zip("qkv", gradients, want_gradients, strict=True):
        assert_close(got, expected, 1e-6, f"gradient by {name}")


def test_one_block_or_many_give_the_same(rng, monkeypatch, small_blocks):
    case = draw_case(rng, (), T, d_key=K, d_value=V)
    many = jax.jit(lambda *arrays: sigmoid_attention(*arrays))(*case[:3])
    monkeypatch.setattr(sigmoid, "_LARGEST_BLOCK", T)
    monkeypatch.setattr(sigmoid, "_SMALLEST_BLOCK", T)
    assert_close(jax.jit(lambda *arrays: sigmoid_attention(*arrays))(*case[:3]), np.float64(many), 1e-6)


def test_blocks_hold_a_bounded_number_of_pairs():
    assert sigmoid._block_size(1) == sigmoid._LARGEST_BLOCK > sigmoid._block_size(24) > sigmoid._block_size(10**6)
    assert sigmoid._block_size(10**6) == sigmoid._SMALLEST_BLOCK
    assert all(n * sigmoid._block_size(n) ** 2 <= sigmoid._PAIRS for n in range(1, 500))


@pytest.mark.parametrize("size", [30.0, 1e18])
def test_no_logit_is_too_large_and_small_weights_keep_their_digits(size, rng):
    """Logits up to 1e36: weights are 0 or 1 then. Of values around 1, each weight keeps its relative precision."""
    case = draw_case(rng, (), T, d_key=K, d_value=V)
    q, k, v = np.float32(size) * case.q, np.abs(case.k), np.abs(case.values) + 1
    q[:, :] = np.abs(q) * np.where(np.arange(T)[:, None] % 2, -1, 1)  # rows of all large and of all small logits
    k = k * np.float32(size if size > 1e3 else 1)
    g = np.ones((T, V), np.float32)
    want, want_gradients = truth(q, k, v, seen_by(T, T, True, None), 1.0, 0.0, g)
    y, gradients = output_and_gradients(sigmoid_attention, q, k, v, g)
    small = want > 1e-30
    np.testing.assert_allclose(np.asarray(y)[small], want[small], rtol=1e-4)  # of logits around 100
    assert np.all(np.asarray(y)[~small] <= 2e-30) and np.max(want) > 0.1
    for name, got, expected in zip("qkv", gradients, want_gradients, strict=True):
        assert_close(got, expected, 1e-4, f"gradient by {name}")


@pytest.mark.parametrize("bias", [-30.0, 30.0])
def test_weights_near_0_and_slopes_near_0_keep_their_relative_precision(bias, rng):
    case = draw_case(rng, (), T, d_key=K, d_value=V)
    v, g = np.abs(case.values), np.ones((T, V), np.float32)
    want, want_gradients = truth(case.q, case.k, v, seen_by(T, T, True, None), 1.0, bias, g)
    attend = functools.partial(sigmoid_attention, bias=bias)
    y, gradients = output_and_gradients(attend, case.q, case.k, v, g)
    np.testing.assert_allclose(y, want, rtol=1e-5)
    for name, got, expected in zip("qkv", gradients, want_gradients, strict=True):
        assert 0 < np.max(np.abs(expected)) and (name == "v" or np.max(np.abs(expected)) < 1e-9)
        assert_close(got, expected, 1e-5, f"gradient by {name}", floor=0.0)


# ---- laws ------------------------------------------------------------------------------------------


def test_queries_see_nothing_of_what_comes_after_them(rng, small_blocks):
    case = draw_case(rng, (2,), T, d_key=K, d_value=V)
    k, v = case.k.copy(), case.values.copy()
    t = T // 2
    k[:, t:] += 1
    v[:, t:] += 1
    run = jax.jit(lambda *arrays: sigmoid_attention(*arrays))
    before, after = np.asarray(run(*case[:3])), np.asarray(run(case.q, k, v))
    np.testing.assert_array_equal(before[:, :t], after[:, :t])
    assert np.all(before[:, t:] != after[:, t:])


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_every_token_twice_multiplies_the_output_by_2_to_the_power_of_1_minus_alpha(alpha, rng):
    with jax.enable_x64(True):
        q, k, v = (rng.standard_normal((2, T, d)) for d in (K, K, V))
        run = jax.jit(functools.partial(sigmoid_attention, alpha=alpha), static_argnames="causal")
        twice = [np.repeat(x, 2, axis=1) for x in (q, k, v)]
        for causal in (False, True):
            y, y_twice = run(q, k, v, causal=causal), np.asarray(run(*twice, causal=causal))
            assert y.dtype == jnp.float64
            # Causal: the second of two equal tokens sees both copies of all up to itself.
            np.testing.assert_allclose(y_twice[:, 1::2], 2 ** (1 - alpha) * y, rtol=1e-12, atol=1e-13)
            first = y_twice[:, ::2]
            assert np.allclose(first, y_twice[:, 1::2], rtol=1e-9) != causal


def test_a_query_divides_by_the_number_of_keys_of_its_own_document():
    """Queries of zero give every key the same weight: 1/2, or 1 / (1 + n) with the bias."""
    ids = np.array([3, 3, 3, 0, 3, 3], np.int32)  # the last two are another document than the first three
    zeros, ones = jnp.zeros((6, K)), jnp.ones((6, V))
    run = jax.jit(sigmoid_attention, static_argnames=("causal", "alpha", "bias"))
    y = run(zeros, zeros, ones, causal=True, alpha=0.5, segment_ids=ids)
    assert_close(y[:, 0], np.sqrt([1, 2, 3, 1, 1, 2]) / 2, 1e-6)
    y = run(zeros, zeros, ones, causal=False, alpha=0.0, bias="-log_n", segment_ids=ids)
    assert_close(y[:, 0], np.array([3, 3, 3, 1, 2, 2]) / np.array([4, 4, 4, 2, 3, 3]), 1e-6)


# ---- a buffer of keys ------------------------------------------------------------------------------


def test_decoding_from_a_buffer_gives_the_rows_of_the_whole(rng, small_blocks):
    """Blocks of 3 queries, at another position in each sequence, with one compiled function; junk after the end."""
    capacity, size = T + 6, 3
    case = draw_case(rng, (2,), T, d_key=K, d_value=V, mean_length=5)
    attend = jax.jit(functools.partial(sigmoid_attention, alpha=0.75, bias="-log_n"))
    whole, packed = (
        np.float64(attend(*case[:3], segment_ids=ids)) for ids in (np.zeros(T, np.int32), case.segment_ids)
    )
    assert not np.array_equal(whole, packed)
    junk = lambda x: np.concatenate([x, 1e6 * np.ones((2, capacity - T, x.shape[-1]), np.float32)], axis=1)
    documents = np.apply_along_axis(document_numbers, -1, case.segment_ids)
    begins = np.stack([np.searchsorted(row, row) for row in documents])
    run = jax.jit(functools.partial(sigmoid_attention_cached, alpha=0.75, bias="-log_n"))
    for n in np.stack([rng.permutation(np.arange(size, T + 1)), rng.permutation(np.arange(size, T + 1))], axis=1):
        rows = n[:, None] - size + np.arange(size)
        pick = lambda x, rows=rows: np.take_along_axis(x, rows[..., None], axis=1)
        k, v = (junk(np.where(np.arange(T)[:, None] < n[:, None, None], x, 1e6)) for x in (case.k, case.values))
        assert_close(run(pick(case.q), k, v, n, first=0 * rows), pick(whole), 1e-6)
        first = np.take_along_axis(begins, rows, axis=1)
        assert_close(run(pick(case.q), k, v, n, first=first), pick(packed), 1e-6)


def test_an_offset_places_the_queries_and_who_sees_nothing_gets_0(rng):
    q, k, v = draw_case(rng, (), 3, T, K, V)[:3]
    run = jax.jit(sigmoid_attention_cached, static_argnames="causal")
    assert not np.any(run(q, k, v, 0))
    want = truth(q, k[:5], v[:5], np.ones((3, 5)) * (np.arange(5) <= np.array([3, 4, 5])[:, None]), 1.0, 0.0)
    assert_close(run(q, k, v, 5, offset=3), want, 1e-6)
    assert_close(run(q, k, v, 5, causal=False), truth(q, k[:5], v[:5], np.ones((3, 5)), 1.0, 0.0), 1e-6)
    assert_close(run(q, k, v, T + 9, causal=False), truth(q, k, v, np.ones((3, T)), 1.0, 0.0), 1e-6)
    before = np.asarray(run(q, k, v, 2))  # the first of the three would be token -1
    assert not np.any(before[0]) and np.all(np.any(before[1:], axis=-1))
    gradient = jax.jit(jax.grad(lambda v: jnp.sum(sigmoid_attention_cached(q, k, v, 5))))(v)
    assert np.all(gradient[:5]) and not np.any(gradient[5:])


# ---- transformations, dtypes, memory ---------------------------------------------------------------


def test_jit_vmap_grad_and_checkpoint_compose(rng, small_blocks):
    """Gradients of a recomputed call, mapped over sequences and their documents, are those of the whole."""
    case = draw_case(rng, (2,), T, d_key=K, d_value=V, mean_length=4)
    g = rng.standard_normal((2, T, V)).astype(np.float32)
    call = jax.checkpoint(lambda q, k, v, ids: sigmoid_attention(q, k, v, segment_ids=ids))
    gradients = jax.grad(lambda q, k, v, ids, g: jnp.sum(g * call(q, k, v, ids)), argnums=(0, 1, 2))
    got = jax.jit(jax.vmap(gradients))(*case[:3], case.segment_ids, g)
    want = truth(*case[:3], seen_by(T, T, True, case.segment_ids), 1.0, 0.0, g)[1]
    for name, x, expected in zip("qkv", got, want, strict=True):
        assert_close(x, expected, 1e-6, f"gradient by {name}")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_taken_up_to_float32(dtype, rng):
    case = draw_case(rng, (), T, d_key=K, d_value=V)
    half = [x.astype(dtype) for x in case[:3]]
    want = truth(*half, seen_by(T, T, True, None), 1.0, 0.0)
    run = jax.jit(lambda *arrays: sigmoid_attention(*arrays))
    y = run(*half)
    assert y.dtype == dtype
    assert_close(y, want, 2.0**-8)
    y = run(*half[:2], half[2].astype(np.float32))
    assert y.dtype == jnp.float32
    assert_close(y, want, 1e-6)


def compile_for(n_tokens, gradient):
    x = jax.ShapeDtypeStruct((2, n_tokens, 8), "float32")
    run = lambda q, k, v, g: jax.vjp(sigmoid_attention, q, k, v)[1](g) if gradient else sigmoid_attention(q, k, v)
    return jax.jit(run).lower(x, x, x, x).compile()


@pytest.mark.parametrize("gradient", [False, True])
def test_memory_is_linear_in_tokens_without_copies_in_loops(gradient):
    short, n_tokens = 16384, 65536
    compiled = [compile_for(n, gradient) for n in (short, n_tokens)]
    grown = [program.memory_analysis().temp_size_in_bytes for program in compiled]
    input_bytes = 4 * 2 * 8 * (n_tokens - short)
    assert grown[1] - grown[0] <= (4 if gradient else 2) * input_bytes
    loops = compiled[1].as_text().split("\nENTRY ")[0].splitlines()
    shape = f"f32[2,{n_tokens},8]"
    assert any(shape in line for line in loops)
    assert not [line for line in loops if shape in line.split(" copy(")[0] and " copy(" in line]


# ---- refusals --------------------------------------------------------------------------------------


def zeros(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


@pytest.mark.parametrize(
    "function", [heinsen.sigmoid_attention, functools.partial(heinsen.sigmoid_attention_cached, n=1)]
)
@pytest.mark.parametrize("name", ["alpha", "bias"])
@pytest.mark.wrong_types
def test_alpha_and_bias_must_be_finite_numbers(function, name):
    call = lambda value: function(zeros(T, K), zeros(T, K), zeros(T, V), **{name: value})
    for value in (np.nan, np.inf, -np.inf, np.float32(np.nan)):
        with pytest.raises(ValueError, match=f"{name} = .*(nan|inf).*: expected a finite number"):
            call(value)
    for value in ("-log n", None, True, 1j, jnp.ones(())):
        with pytest.raises(TypeError, match=f"{name} = {re.escape(repr(value))}: expected a finite Python number"):
            call(value)
    alternative = name == "bias"
    with pytest.raises(TypeError) as error:
        call("log_n")
    assert ('or "-log_n"' in str(error.value)) == alternative
    for value in (np.float32(0.5), 2):
        assert jax.eval_shape(lambda value=value: call(value)).shape == (T, V)


@pytest.mark.parametrize(
    "shapes, message",
    [
        (((T, K + 1), (T, K), (T, V)), "q and k differ in their last axis"),
        (((T, K), (T, K), (T + 1, V)), "k and v differ in their number of tokens"),
        (((2, T, K), (2, T, K), (1, T, V)), "q, k and v differ in their leading axes"),
        (((T + 1, K), (T, K), (T, V)), "causal attention needs as many queries as keys"),
        (((T, K), (T, K), (T, 0)), "none of them empty"),
    ],
)
@pytest.mark.wrong_types
def test_shapes_that_do_not_fit_are_named(shapes, message):
    with pytest.raises(ValueError, match=message):
        sigmoid_attention(*(zeros(*shape) for shape in shapes))


@pytest.mark.wrong_types
def test_dtypes_that_do_not_fit_are_named():
    with pytest.raises(TypeError, match="k has dtype int32: .*float"):
        sigmoid_attention(zeros(T, K), zeros(T, K, dtype=jnp.int32), zeros(T, V))
    with pytest.raises(TypeError, match="segment_ids has dtype float32: expected integers"):
        sigmoid_attention(zeros(T, K), zeros(T, K), zeros(T, V), segment_ids=zeros(T))


@pytest.mark.wrong_types
def test_numbers_of_keys_and_positions_that_do_not_fit_are_named():
    call = functools.partial(sigmoid_attention_cached, zeros(2, 3, K), zeros(2, T, K), zeros(2, T, V))
    with pytest.raises(TypeError, match="n has dtype float32: expected integers"):
        call(1.0)
    with pytest.raises(ValueError, match=re.escape("n (3,) does not broadcast to (2,)")):
        call(np.ones(3, np.int32))
    with pytest.raises(ValueError, match=re.escape("offset (1, 2) does not broadcast to (2,)")):
        call(1, offset=np.ones((1, 2), np.int32))
    with pytest.raises(ValueError, match=re.escape("first (2, 1, 1) does not broadcast to (2, 3)")):
        call(1, first=np.ones((2, 1, 1), np.int32))
