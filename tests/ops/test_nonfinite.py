"""Inputs that are not finite, cotangents of any size, and derivatives that an implementation does not have."""

import functools

import jax
import numpy as np
import pytest

import heinsen
from heinsen.ops import schedule
from tests.ops.common import PORTABLE

T, K, V = 14, 3, 2
FORMS = [(function, form) for function in ("log_attention", "attention") for form in PORTABLE]
forms = pytest.mark.parametrize("function, implementation", FORMS)


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(function, implementation, arrays, segment_ids, g):
    """Output, and gradients of its product with g; several chunks and groups."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "choose_chunk_size", lambda d_key: 4)
        patch.setattr(schedule, "chunks_per_group", lambda elements: 2)
        attend = functools.partial(
            getattr(heinsen, function), implementation=implementation, segment_ids=segment_ids, return_state=True
        )
        y, vjp, end = jax.vjp(attend, *arrays, has_aux=True)
        return y, vjp(g), end


def draw(rng):
    return [rng.standard_normal((2, T, n)).astype(np.float32) for n in (K, K, V)]


@forms
def test_what_is_not_finite_reaches_only_what_sees_it(function, implementation, rng):
    """That is NaN, with gradients of 0; outputs and gradients of all others are those without it."""
    arrays, second = draw(rng), 11  # the second document begins within a chunk
    segment_ids = (np.arange(T) >= second).astype(np.int32)
    cotangent = rng.standard_normal((2, T, V)).astype(np.float32)
    bads = [(0, np.nan), (0, np.inf), (1, np.nan), (1, np.inf), (2, np.nan), (2, np.inf)]
    if function == "attention":
        bads.append((2, -np.inf))  # a log value may be: zero
    for t in range(1, second):
        for of_query in (True, False):
            unaware = np.ones((2, T, 1), bool)
            unaware[0, t : t + 1 if of_query else second] = False
            g = np.where(unaware, cotangent, 0)
            y, gradients, end = jax.tree.map(np.asarray, run(function, implementation, arrays, segment_ids, g))
            want = np.where(unaware, y, np.nan), *gradients, end
            for which, bad in bads:
                if (which == 0) == of_query:
                    damaged = [x.copy() for x in arrays]
                    damaged[which][0, t, 1] = bad
                    y, gradients, end = run(function, implementation, damaged, segment_ids, cotangent)
                    at = f"{'qkv'[which]} = {bad} at {t}"
                    close = functools.partial(np.testing.assert_allclose, atol=1e-5, err_msg=at)
                    jax.tree.map(close, (y, *gradients, end), want)


@pytest.mark.parametrize("function", ["log_attention", "attention"])
def test_gradients_are_proportional_to_cotangents_of_any_size(function, rng):
    arrays = draw(rng)
    arrays[2] = 15 * arrays[2]  # sums down to 1e-20 of their shift
    g = rng.standard_normal((2, T, V)).astype(np.float32)
    same = np.zeros(T, np.int32)
    want = run(function, "chunked", arrays, same, g)[1]
    for scale in (1e-15, 1e10, 1e20, 1e30):
        got = run(function, "chunked", arrays, same, np.float32(scale) * g)[1]
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(np.float64(a) / scale, b, atol=1e-5 * np.abs(b).max())


def test_forward_mode_is_the_reference_s_and_the_others_say_so(rng):
    arrays, tangents = draw(rng), draw(rng)
    call = lambda form: lambda *arrays: heinsen.attention(*arrays, implementation=form)
    with pytest.raises(TypeError, match='"scan" or "reference"'):
        jax.jvp(call("chunked"), arrays, tangents)
    g = rng.standard_normal((2, T, V)).astype(np.float32)
    tangent = jax.jit(lambda *arrays: jax.jvp(call("reference"), arrays, tuple(tangents))[1])(*arrays)
    gradients = run("attention", "chunked", arrays, np.zeros(T, np.int32), g)[1]
    want = sum(np.vdot(np.float64(a), np.float64(b)) for a, b in zip(gradients, tangents, strict=True))
    np.testing.assert_allclose(np.vdot(np.float64(g), np.float64(tangent)), want, rtol=1e-3, atol=1e-3)
