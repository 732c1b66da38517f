"""The fused kernels for TPUs: in JAX's interpret mode against float64 truth (compiled: tests/plan).

The interpret mode watches for races between copies and reads of the chip's memory, which it fills with NaN beforehand.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

import heinsen
from heinsen import LogState, MeanState, backend
from heinsen.contrib.kernels import interpret, tpu
from heinsen.errors import InputError
from tests.ops.common import spoil_exact_form
from tests.ops.test_implementations import CASES, check, check_wide, draw
from tests.ops.truth import draw_case

PARAMS = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")


class Form:
    """One of the two functions, as the tests of all implementations want it."""

    def __init__(self, function):
        self.function, self.signed = getattr(heinsen, function), function == "attention"
        self.kind = MeanState if self.signed else LogState

    def run_with_gradients(self, case, cotangents):
        """y, state parts, gradients by q, k, values, log_decay (or None) and, where one came in, the state's parts."""
        state = None if case.state is None else self.kind(*case.state)
        segment_ids = None if case.segment_ids is None else jnp.asarray(case.segment_ids)
        given = {"causal": case.causal, "segment_ids": segment_ids, "implementation": "pallas"}

        def call(q, k, values, log_decay, state):
            return self.function(q, k, values, log_decay=log_decay, state=state, return_state=True, **given)

        @jax.jit
        def run(inputs, cotangents):
            out, pull = jax.vjp(call, *inputs)
            return out, pull(cotangents)

        inputs = case.q, case.k, case.values, case.log_decay, state
        with backend.compiling_for("tpu"), interpret.interpreted(PARAMS):
            (y, end), (*gradients, of_state) = run(inputs, (cotangents[0], self.kind(*cotangents[1:])))
        assert not interpret_pallas_call.races.races_found
        y, end, gradients = jax.tree.map(np.asarray, (y, tuple(end), (*gradients, *(of_state or ()))))
        return y, end, gradients


@pytest.fixture(params=["log_attention", "attention"])
def form(request):
    return Form(request.param)


@pytest.fixture
def small_chunks(monkeypatch):
    """Few tokens, which are interpreted fast, are several chunks."""
    monkeypatch.setattr(tpu, "CHUNK", 8)


def test_gated_documents_with_a_state_are_the_truth(rng, small_chunks, monkeypatch):
    """By the kernels alone."""
    spoil_exact_form(monkeypatch, tpu.Fused)
    case = draw_case(rng, (2,), 18, d_key=16, d_value=5, mean_length=9, decay=True, state=True)
    check(Form("log_attention"), case, rng)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_all_cases_are_the_truth(form, name, rng, small_chunks):
    check(form, draw(rng, name), rng)


@pytest.mark.long
@pytest.mark.parametrize("scale", [16, 32])
@pytest.mark.parametrize("name", ["causal", "documents, state", "all keys"])
def test_wide_dynamic_range(form, name, scale, rng, small_chunks):
    """Terms are lost in the kernels, and the exact form takes over."""
    check_wide(form, draw(rng, name, scale=scale), rng)


@pytest.mark.long
@pytest.mark.parametrize("scale", [1, 16, 32])
def test_chunks_of_the_real_size_and_any_dynamic_range_are_the_truth(form, scale, rng):
    check_wide(form, draw_case(rng, (1,), 140, d_key=8, d_value=6, state=True, scale=scale), rng)


@pytest.mark.long
@pytest.mark.parametrize("d_key, d_value", [(16, 16), (32, 64), (64, 32), (128, 128), (24, 40), (33, 1)])
def test_heads_of_any_size_are_the_truth(form, d_key, d_value, rng, small_chunks):
    options = dict(d_key=d_key, d_value=d_value, mean_length=15, decay=True, state=True)
    check(form, draw_case(rng, (3, 2), 21, **options), rng, 2e-5, 2e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", ["causal", "documents, state"])
def test_masked_keys_and_zero_values_are_the_truth(form, name, rng, small_chunks):
    case = draw(rng, name)
    case.k[..., 0, :] = case.k[..., 3, :] = -np.inf  # whole tokens; without a state the first query sees nothing
    case.k[1, :, 0] = -np.inf  # a feature of all tokens
    case.q[1, 3, :] = -np.inf  # a query of nothing
    if not form.signed:
        case.values[0, :, 1] = -np.inf  # a value that is always zero
    check(form, case, rng)


def test_float64_is_an_error():
    with jax.enable_x64(True), backend.compiling_for("tpu"), interpret.interpreted(PARAMS):
        x = jnp.zeros((1, 8, 32), jnp.float64)
        with pytest.raises(InputError, match='computes in float32, not float64: pass implementation="chunked"'):
            heinsen.log_attention(x, x, x, implementation="pallas")
