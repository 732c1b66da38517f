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
from heinsen import backend
from heinsen.contrib.kernels import interpret, mosaic_gpu
from heinsen.errors import InputError
from tests.ops.oracle import Form, check, draw_case

CASES = {
    "real gate": dict(kind="real", n_queries=70, d_key=16, d_value=64, state=True, decay=True),
}
LONG_CASES = {
    "gate": dict(kind="log", n_queries=130, d_key=32, d_value=16, decay=True, mean_length=30, state=True),
    "mild gate": dict(kind="log", n_queries=130, d_key=16, d_value=16, decay=True, state=True),
    "plain": dict(kind="log", n_queries=130, d_key=32, d_value=32),
    "real": dict(kind="real", n_queries=70, d_key=64, d_value=16),
    "documents": dict(kind="log", n_queries=140, d_key=24, d_value=40, mean_length=30),
    "both ways": dict(kind="log", n_queries=70, d_key=16, d_value=16, mean_length=20, causal=False),
    "no leading axes": dict(kind="log", batch=(), n_queries=30, d_key=16, d_value=16, state=True, decay=True),
    "one row, one chunk": dict(kind="log", batch=(1, 1), n_queries=60, d_key=32, d_value=16, state=True),
    "wide": dict(kind="log", n_queries=70, d_key=16, d_value=16, scale=30.0),  # terms are lost: exact
}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.long) for name in LONG_CASES)])
def test_values_states_and_gradients_are_the_truth(name, rng, monkeypatch):
    """By the kernels alone, but for the case that loses terms and the one that is not causal."""
    options = (CASES | LONG_CASES)[name].copy()
    if name not in ("wide", "both ways"):
        attend = mosaic_gpu.chunked.attend
        spoiled = lambda *args: jax.tree.map(lambda x: x * jnp.nan, attend(*args))
        monkeypatch.setattr(mosaic_gpu.chunked, "attend", spoiled)
    form = Form(options.pop("kind"), (("implementation", "pallas"),), small=False)
    case = draw_case(rng, form.kind, **{"batch": (2,)} | options)
    if name == "mild gate":  # which leaves something of earlier chunks
        case.x["log_decay"] = np.maximum(case.x["log_decay"], -50) / 100
    with interpret.interpreted(InterpretGPUParams(detect_races=True)):
        check(form, case, rng, 1e-5, 3e-5)
    assert not interpret_pallas_call.get_races().races_found


def test_bfloat16_queries_and_keys_that_see_all_keys_are_taken_up_to_float32(rng):
    q, k, v = (jnp.asarray(8 * rng.standard_normal((2, 9, 16)), jnp.bfloat16) for _ in range(3))
    with interpret.interpreted(InterpretGPUParams()):
        y = heinsen.attention(q, k, v, causal=False, implementation="pallas")
    np.testing.assert_array_equal(y, heinsen.attention(q, k, v, causal=False))


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
