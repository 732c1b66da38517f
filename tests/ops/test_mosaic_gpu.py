"""The fused kernels for Hopper GPUs: in JAX's interpret mode against float64 truth (compiled: tests/plan).

The interpret mode watches for races between copies and reads of shared memory, and fills memory with NaN beforehand.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

import heinsen
from heinsen import LogState, MeanState, backend
from heinsen.contrib.kernels import interpret, mosaic_gpu
from heinsen.errors import InputError
from tests.ops.truth import assert_close, assert_gradients_close, draw_case, truth


def run_interpreted(case, signed, cotangents):
    """(y, state), and gradients by q, k, values, log_decay and the state's parts."""
    function, kind = (heinsen.attention, MeanState) if signed else (heinsen.log_attention, LogState)

    def call(q, k, values, log_decay, state):
        given = {"log_decay": log_decay, "state": state, "segment_ids": segment_ids, "causal": case.causal}
        return function(q, k, values, **given, implementation="pallas", return_state=True)

    def run(*inputs):
        out, pull = jax.vjp(call, *inputs)
        return out, pull((cotangents[0], kind(*cotangents[1:])))

    segment_ids = None if case.segment_ids is None else jnp.asarray(case.segment_ids)
    state = None if case.state is None else kind(*case.state)
    with interpret.interpreted(InterpretGPUParams(detect_races=True)):
        out, gradients = jax.jit(run)(case.q, case.k, case.values, case.log_decay, state)
    assert not interpret_pallas_call.get_races().races_found
    return *out, (*gradients[:4], *(gradients[4] or ()))


CASES = {
    "real gate": dict(signed=True, n_queries=70, d_key=16, d_value=64, state=True, decay=True),
}
LONG_CASES = {
    "gate": dict(signed=False, n_queries=130, d_key=32, d_value=16, decay=True, mean_length=30, state=True),
    "mild gate": dict(signed=False, n_queries=130, d_key=16, d_value=16, decay=True, state=True),
    "plain": dict(signed=False, n_queries=130, d_key=32, d_value=32),
    "real": dict(signed=True, n_queries=70, d_key=64, d_value=16),
    "documents": dict(signed=False, n_queries=140, d_key=24, d_value=40, mean_length=30),
    "both ways": dict(signed=False, n_queries=70, d_key=16, d_value=16, mean_length=20, causal=False),
    "no leading axes": dict(signed=False, batch=(), n_queries=30, d_key=16, d_value=16, state=True, decay=True),
    "one row, one chunk": dict(signed=False, batch=(1, 1), n_queries=60, d_key=32, d_value=16, state=True),
    "wide": dict(signed=False, n_queries=70, d_key=16, d_value=16, scale=30.0),  # terms are lost: exact
}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.long) for name in LONG_CASES)])
def test_values_states_and_gradients_are_the_truth(name, rng, monkeypatch):
    """By the kernels alone, but for the case that loses terms and the one that is not causal."""
    options = (CASES | LONG_CASES)[name].copy()
    if name not in ("wide", "both ways"):
        attend = mosaic_gpu.chunked.attend
        spoiled = lambda *args: jax.tree.map(lambda x: x * jnp.nan, attend(*args))
        monkeypatch.setattr(mosaic_gpu.chunked, "attend", spoiled)
    signed = options.pop("signed")
    batch = options.pop("batch", (2,))
    case = draw_case(rng, batch=batch, **options)
    if name == "mild gate":  # which leaves something of earlier chunks
        case = case._replace(log_decay=np.maximum(case.log_decay, -50) / 100)
    d_key, d_value = case.k.shape[-1], case.values.shape[-1]
    shapes = (*batch, case.q.shape[-2], d_value), (*batch, d_key, d_value), (*batch, d_key)
    cotangents = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    y, state, gradients = run_interpreted(case, signed, cotangents)
    want = truth(case, signed, cotangents)
    assert_close(y, want.y, 1e-5, "y")
    for got, expected in zip(state, want.state, strict=True):
        assert_close(got, expected, 1e-5, "state")
    assert_gradients_close(gradients, want.gradients, case, signed, 3e-5)


@pytest.mark.parametrize(
    "shape, dtype, message",
    [
        ((1, 8, 128), jnp.float32, "heads of at most 64 features, not K = 128"),
        ((1, 8, 32), jnp.float64, "computes in float32, not float64"),
    ],
)
def test_what_the_kernels_do_not_take_is_an_error(shape, dtype, message):
    with jax.enable_x64(True), interpret.interpreted(InterpretGPUParams()):
        x = jnp.zeros(shape, dtype)
        with pytest.raises(InputError, match=f'{message}: pass implementation="chunked"'):
            heinsen.log_attention(x, x, x, implementation="pallas")


@pytest.mark.parametrize("name", ["cpu", "tpu"])
def test_a_device_that_cannot_run_the_kernels_is_an_error(name):
    x = jnp.zeros((1, 8, 32))
    with backend.compiling_for(name), pytest.raises(InputError, match=rf"needs a Hopper GPU .*, not {name}: pass"):
        heinsen.log_attention(x, x, x, implementation="pallas")


def test_derivatives_that_the_kernels_do_not_have_are_an_error():
    def loss(x):
        return jnp.sum(heinsen.log_attention(x, x, x, implementation="pallas"))

    x = jnp.zeros((1, 8, 16))
    with interpret.interpreted(InterpretGPUParams()):
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jvp(loss, (x,), (x,))
        with pytest.raises(TypeError, match='no other derivatives: pass implementation="chunked"'):
            jax.jvp(jax.grad(loss), (x,), (x,))
