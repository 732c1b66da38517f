"""Inputs that are not finite reach no earlier output and no other row; cotangents may be large or small."""

import functools

import jax
import numpy as np
import pytest

import heinsen
from tests.ops.common import PORTABLE, small_sizes

T, K, V = 14, 3, 2
NAMES = ("q", "k", "values", "log_decay")


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(function, implementation, q, k, values, log_decay):
    """Outputs and the state after all tokens; several blocks and chunks."""
    with small_sizes():
        attend = functools.partial(getattr(heinsen, function), implementation=implementation, return_state=True)
        return attend(q, k, values, log_decay=log_decay)


def draw(rng):
    return [*(rng.standard_normal((2, T, n)).astype(np.float32) for n in (K, K, V)), -np.float32(rng.random((2, T)))]


@pytest.mark.parametrize("implementation", PORTABLE)
@pytest.mark.parametrize("function", ["log_attention", "attention"])
@pytest.mark.parametrize("spread", [1, 40])
def test_what_a_token_holds_changes_no_earlier_output_and_no_other_row(function, implementation, spread, rng):
    arrays = draw(rng)
    arrays[1] *= spread
    y, end = jax.tree.map(np.asarray, run(function, implementation, *arrays))
    for which, name in enumerate(NAMES):
        for bad in (np.nan, np.inf) if name != "log_decay" else (np.nan,):
            for t in range(T):
                damaged = [x.copy() for x in arrays]
                damaged[which][(0, t, 1)[: arrays[which].ndim]] = bad
                got, got_end = run(function, implementation, *damaged)
                what = f"{name} = {bad} at {t}"
                np.testing.assert_allclose(got[0, :t], y[0, :t], atol=2e-5, err_msg=what)
                np.testing.assert_allclose(got[1], y[1], atol=2e-5, err_msg=what)
                jax.tree.map(
                    lambda x, want, what=what: np.testing.assert_allclose(x[1], want[1], atol=2e-5), got_end, end
                )
                if t > 0:  # of which something is seen before
                    assert not np.all(np.isfinite(got[0, t])), what
                if name != "q" and t > 0:
                    assert not np.any(np.all(np.isfinite(got[0, t:]), axis=-1)), what


def test_gradients_are_proportional_to_cotangents_up_to_1e10(rng):
    arrays = draw(rng)
    arrays[2] = 10 * arrays[2]
    g = rng.standard_normal((2, T, V)).astype(np.float32)
    grads = jax.jit(lambda g, *arrays: jax.vjp(heinsen.log_attention, *arrays)[1](g))
    want = grads(g, *arrays[:3])
    for scale in (1e-15, 1e10):  # docs/attention.md: quotients by sums of 1e-27 stay within float32
        for a, b in zip(grads(np.float32(scale) * g, *arrays[:3]), want, strict=True):
            np.testing.assert_allclose(np.float64(a) / scale, b, atol=1e-5 * np.abs(b).max())
