"""Every kind of attention, in every implementation, against one oracle of all pairs in float64: tests/ops/oracle.py.

A new entry of `heinsen.ops.api.IMPLEMENTATIONS` is tested here without further ado, except "pallas", whose kernels need
a device: test_mosaic_gpu.py. Transformations: test_transforms.py; buffers of keys: test_buffers.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import heinsen
from heinsen import LogState, MeanState, init_state
from tests.ops.common import PORTABLE, SMALL, user_jit
from tests.ops.oracle import (
    TOLERANCES,
    Form,
    assert_close,
    assert_gradients_close,
    check,
    draw_case,
    draw_cotangents,
    run,
    truth,
)

ATTENTION = [Form(kind, (("implementation", name),)) for kind in ("log", "real") for name in PORTABLE]
SIGMOID = [
    Form("sigmoid", (("alpha", alpha), ("bias", bias)))
    for alpha, bias in ((1.0, 0.0), (0.5, "-log_n"), (1.5, -1.25), (0.0, "-log_n"))
]
OTHERS = [Form("linear"), Form("delta"), SIGMOID[1], Form("softmax"), Form("softmax", platform="tpu")]
FORMS = [*ATTENTION, *OTHERS]
T = 2 * SMALL + 3  # chunks, the last one a part of one


def parametrize(*forms):
    return pytest.mark.parametrize("form", forms, ids=str)


# Kinds, and what `draw_case` takes. With states, decays and documents together are the equations with each alone.
CASES = {
    "plain": ("log real linear delta sigmoid softmax", dict(batch=(2,), n_queries=T)),
    "state": ("log real", dict(batch=(2, 2), n_queries=5, d_key=2, d_value=6, state=True)),
    "documents": ("sigmoid softmax delta", dict(batch=(2, 3), n_queries=T, mean_length=4)),
    "documents, state": ("log real linear", dict(batch=(2,), n_queries=T, mean_length=3, state=True)),
    "decay": ("log real softmax", dict(batch=(2, 3), n_queries=T, decay=True)),
    "decay, whole chunks": ("linear delta", dict(batch=(2, 3), n_queries=2 * SMALL, decay=True, state=True)),
    "decay, documents": ("softmax", dict(batch=(2, 3), n_queries=T, mean_length=4, decay=True)),
    "decay, documents, state": (
        "log real linear delta",
        dict(batch=(3,), n_queries=T, mean_length=4, state=True, decay=True),
    ),
    "decay, one token, state": (
        "log real linear delta",
        dict(batch=(2, 2), n_queries=1, d_key=2, d_value=6, state=True, decay=True),
    ),
    "all keys": ("log real linear sigmoid", dict(batch=(2,), n_queries=5, n_keys=T, causal=False)),
    "all keys, as many queries": ("softmax", dict(batch=(2, 3), n_queries=T, causal=False)),
    "all keys, one query, state": (
        "log real linear",
        dict(n_queries=1, n_keys=5, d_key=1, d_value=1, causal=False, state=True),
    ),
    "all keys, documents, state": (
        "log real linear",
        dict(batch=(2,), n_queries=T, d_key=5, causal=False, mean_length=6, state=True),
    ),
    "all keys, documents": ("sigmoid softmax", dict(batch=(2, 3), n_queries=T, causal=False, mean_length=4)),
}
# Contained in others: of log and real values.
COVERED = ("plain", "state", "documents, state", "decay", "decay, one token, state", "all keys")


def draw(rng, form, name, **changes):
    options = CASES[name][1] | changes
    if form.kind == "softmax":  # which has heads, sizes that are equal on accelerators, and decays that end nothing
        options |= dict(batch=(2, 3), d_value=4)
    case = draw_case(rng, form.kind, **options)
    if form.kind == "softmax" and "log_decay" in case.x:
        case.x["log_decay"] = np.float32(-rng.exponential(1, (2, 3, T)))
    return case


def table():
    for name, (kinds, _) in CASES.items():
        for form in FORMS:
            is_long = form in ATTENTION and name in COVERED
            if form.kind in kinds.split():
                yield pytest.param(form, name, marks=[pytest.mark.long] * is_long, id=f"{name}: {form}")
    yield pytest.param(SIGMOID[0], "plain", id="plain: default sigmoid")
    yield pytest.param(SIGMOID[2], "all keys, documents", id="all keys, documents: scaled sigmoid")
    yield pytest.param(SIGMOID[3], "all keys", id="all keys: sigmoid that is not divided")
    yield pytest.param(dataclasses.replace(SIGMOID[0], small=False), "documents", id="documents: sigmoid in one block")


@pytest.mark.parametrize("form, name", list(table()))
def test_outputs_states_and_gradients_are_the_truth(form, name, rng):
    check(form, draw(rng, form, name), rng)


# ---- every size ----------------------------------------------------------------------------------

REAL_SIZES = [
    dataclasses.replace(form, small=False) for form in ATTENTION if ("implementation", "chunked") in form.options
]
ON_ACCELERATORS = dataclasses.replace(REAL_SIZES[0], platform="gpu")
LONG = dict(batch=(1, 4), n_queries=70, d_key=8, d_value=6, state=True)


def check_wide(form, case, rng):
    """Logarithms of some hundred are known to 1e-5, and so are their exponentials."""
    cotangents = draw_cotangents(rng, form, case)
    ((y, state), gradients), ((want, want_state), wanted) = run(form, case, cotangents), truth(form, case, cotangents)
    if form.signed:
        assert_close(y, want, 5e-5, "y")
    else:
        assert np.all(np.isfinite(y)) and np.abs(y - want).max() < 1e-4
    for part, expected, tolerance in zip(state, want_state, (5e-5, 1e-6), strict=True):
        assert_close(part, expected, tolerance, "state")
    assert_gradients_close(gradients, wanted, case, form, 2e-4)


@pytest.mark.parametrize("scale", [1, pytest.param(16, marks=pytest.mark.long), 32])
@parametrize(*REAL_SIZES)
def test_long_sequences_of_any_dynamic_range_are_the_truth(form, rng, scale):
    """With chunks of the real size. (Equations and scan are no other computation when T is larger.)"""
    check_wide(form, draw_case(rng, form.kind, **LONG, scale=scale), rng)


@pytest.mark.parametrize("scale", [1, 32])
def test_the_chunks_of_accelerators_are_the_truth(rng, scale):
    options = dict(n_queries=140, d_key=4, d_value=3, mean_length=30, decay=True, state=True)
    case = draw_case(rng, "log", (2, 4), **options, scale=scale)
    (check_wide if scale > 1 else check)(ON_ACCELERATORS, case, rng)


@pytest.mark.parametrize("scale", [pytest.param(16, marks=pytest.mark.long), 32])
@pytest.mark.parametrize("name", ["plain", "documents, state", "all keys"])
@parametrize(*ATTENTION)
def test_wide_dynamic_range(form, rng, name, scale):
    """Logarithms of some hundred, beyond exp's range in float32: nothing is lost, forward or backward."""
    case = draw(rng, form, name, scale=scale)
    assert np.ptp(case.x["q"][..., :4, None, :] + case.x["k"][..., None, :4, :]) > 60
    check_wide(form, case, rng)


@pytest.mark.parametrize(
    "kind, mean_length, scale",
    [pytest.param("log", 0, 1, marks=pytest.mark.long), ("real", 20, 1), ("log", 20, 64)],
)
def test_both_directions_are_gated_separately_and_the_later_one_leaves_out_the_token(rng, kind, mean_length, scale):
    options = dict(n_queries=int(rng.integers(60, 100)), causal=False, decay=True, after=True, mean_length=mean_length)
    case = draw_case(rng, kind, (2,), **options, scale=scale)
    check(Form(kind, small=False), case, rng, 2e-5 if scale == 1 else 1e-6, 1e-4)


@parametrize(*ATTENTION)
def test_the_next_document_may_begin_lower_than_exp_can_hold(form, rng):
    """The sums fall by 200 nats where the second document begins, and rise by 100 with the third."""
    case = draw(rng, form, "documents, state")
    case.ids[...] = [0] * 2 + [1] * 3 + [2] * (T - 5)
    case.x["k"][..., :2, :] += 100
    case.x["k"][..., 2:5, :] -= 100
    check(form, case, rng, 2e-5, 2e-4)


@pytest.mark.parametrize("batch, n_tokens", [((32, 4), 17), ((1, 4), 5)])
def test_gradients_of_few_chunks_with_a_leading_axis_of_1(batch, n_tokens, rng):
    """jaxlib 0.10.2 crashes in some fused operations on such arrays (docs/log/2026-11.md)."""
    q, k, v = (np.float32(scale * rng.standard_normal((*batch, n_tokens, 16))) for scale in (40, 40, 1))
    gradients = user_jit(jax.grad(lambda *x: jnp.sum(heinsen.attention(*x)), (0, 1, 2)))(q, k, v)
    assert all(np.all(np.isfinite(x)) for x in gradients)


@pytest.mark.parametrize("size", [30.0, 1e18])
def test_no_logit_of_a_sigmoid_is_too_large_and_small_weights_keep_their_digits(size, rng):
    """Logits up to 1e36: weights are 0 or 1 then. Of values around 1, each weight keeps its relative precision."""
    case = draw_case(rng, "sigmoid", (), T)
    q, k, v = np.float32(size) * case.x["q"], np.abs(case.x["k"]), np.abs(case.x["values"]) + 1
    q[:, :] = np.abs(q) * np.where(np.arange(T)[:, None] % 2, -1, 1)  # rows of all large and of all small logits
    case = case.change(q=q, k=k * np.float32(size if size > 1e3 else 1), values=v)
    cotangents = np.ones_like(v), ()
    ((y, _), gradients), ((want, _), wanted) = run(SIGMOID[0], case, cotangents), truth(SIGMOID[0], case, cotangents)
    small = want > 1e-30
    np.testing.assert_allclose(y[small], want[small], rtol=1e-4)  # of logits around 100
    assert np.all(y[~small] <= 2e-30) and np.max(want) > 0.1
    assert_gradients_close(gradients, wanted, case, SIGMOID[0], 1e-4)


@pytest.mark.parametrize("bias", [-30.0, 30.0])
def test_weights_near_0_and_slopes_near_0_keep_their_relative_precision(bias, rng):
    form, case = Form("sigmoid", (("bias", bias),)), draw_case(rng, "sigmoid", (), T)
    case.x["values"] = np.abs(case.x["values"])
    cotangents = np.ones_like(case.x["values"]), ()
    ((y, _), gradients), ((want, _), wanted) = run(form, case, cotangents), truth(form, case, cotangents)
    np.testing.assert_allclose(y, want, rtol=1e-5)
    for name, expected in wanted.items():
        assert 0 < np.max(np.abs(expected)) and (name == "values" or np.max(np.abs(expected)) < 1e-9)
        assert_close(gradients[name], expected, 1e-5, f"gradient by {name}", floor=0.0)


def test_the_delta_rule_in_chunks_of_64_tokens_with_keys_that_are_alike(rng):
    """With one key and betas of 1 the powers of A are binomial coefficients, up to 1e18, and the inverse is 0 or 1.

    Errors of the state add up: nothing forgets.
    """
    case = draw_case(rng, "delta", (2, 3), 150, d_key=24, d_value=8, state=True)
    k = np.float32(np.ones_like(case.x["k"]) + np.float32([0, 0.1, 1])[:, None, None] * case.x["k"] * 4)
    beta = np.float32(1 - 0.1 * rng.random((2, 3, 150)) * np.array([[0], [1]])[..., None])
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    check(Form("delta", small=False), case.change(k=k, beta=beta), rng)


def test_the_delta_rule_of_many_rows_of_few_tokens(rng):
    """In chunks of 16 tokens, the gradient of three axes of batches ends the process with jax 0.10.2."""
    check(Form("delta", small=False), draw_case(rng, "delta", (4, 8, 4), 12, d_key=16, d_value=8, decay=True), rng)


# ---- what is masked ------------------------------------------------------------------------------

MASKED = ["plain", "documents, state", "all keys"]


@pytest.mark.parametrize("name", MASKED)
@parametrize(*ATTENTION, Form("linear"))
def test_masked_keys_and_zero_values_have_the_truth_with_finite_gradients(form, rng, name):
    case = draw(rng, form, name)
    x, nothing = case.x, 0 if form.signed else -np.inf
    x["k"][..., 0, :] = -np.inf  # a whole token; without a state the first query sees nothing
    x["k"][..., 3, :] = -np.inf
    x["k"][0, 5, 1:3] = -np.inf  # some features of a token
    x["k"][1, :, 0] = -np.inf  # a feature of all tokens
    if form.kind != "linear":
        x["q"][0, 2, 2] = -np.inf
        x["q"][1, 3, :] = -np.inf  # a query of nothing
        if "state" in x:
            x["state"][1][0, 3] = -np.inf
            x["state"][0][0, 3] = nothing
    if not form.signed:
        x["values"][..., 2, :] = -np.inf
        x["values"][0, :, 1] = -np.inf  # a value that is always zero
    y = check(form, case, rng)
    assert form.kind == "linear" or np.all(y[1, 3] == nothing)
    assert name != "plain" or np.all(y[:, 0] == nothing)


@pytest.mark.parametrize("name", MASKED)
@parametrize(*ATTENTION)
def test_everything_masked_is_nothing(form, rng, name):
    case, nothing = draw(rng, form, name), 0 if form.signed else -np.inf
    case.x["k"][...] = -np.inf
    if "state" in case.x:
        case.x["state"][1][...] = -np.inf
        case.x["state"][0][...] = nothing
    assert np.all(check(form, case, rng) == nothing)


@parametrize(*ATTENTION)
def test_values_all_zero_are_zero(form, rng):
    case, nothing = draw(rng, form, "plain"), 0 if form.signed else -np.inf
    case.x["values"][...] = nothing
    assert np.all(check(form, case, rng) == nothing)


# ---- laws bit for bit ----------------------------------------------------------------------------

CAUSAL = [*ATTENTION, Form("linear"), Form("delta"), SIGMOID[0], Form("softmax")]


@parametrize(*CAUSAL)
def test_later_tokens_change_no_output_and_have_no_gradient(form, rng):
    """Bit for bit; what a token itself reads is changed."""
    case, t = draw(rng, form, "plain"), int(rng.integers(1, T - 1))
    if form.kind == "delta":  # a token with a beta of 0 writes nothing
        case.x["beta"] = np.maximum(case.x["beta"], np.float32(0.1))
    y, *cotangents = draw_cotangents(rng, form, case)
    y[..., t + 1 :, :] = 0
    cotangents = (y, jax.tree.map(np.zeros_like, *cotangents))
    later = {name: x.copy() for name, x in case.x.items() if name in ("k", "values")}
    for x in later.values():
        x[..., 0, :] = x.max(
            -2
        )  # so that lowering others changes no maximum over tokens, which would round differently
    ((y, _), gradients) = run(form, case.change(**later), cotangents)
    assert all(np.all(x[..., t + 1 :, :] == 0) and np.any(x) for x in map(gradients.get, ("q", "k", "values")))
    changed = {name: np.where(np.arange(T)[:, None] > t, x - 1, x) for name, x in later.items()}
    if form.kind == "delta":
        del changed["k"]
    other = run(form, case.change(**later | changed), cotangents)[0][0]
    np.testing.assert_array_equal(y[..., : t + 1, :], other[..., : t + 1, :])
    assert np.all(np.any(y != other, axis=-1)[..., t + 1 :])


@pytest.mark.parametrize("by", ["a document", "a decay"])
@parametrize(Form("linear"), Form("delta"))
def test_what_is_forgotten_has_no_influence_at_all(form, rng, by):
    """Bit for bit, after a document's start or a decay of -inf, by the state and large numbers too."""
    case, t = draw(rng, form, "decay, documents, state"), SMALL + 2
    decay = np.maximum(case.x["log_decay"], -1)
    decay[..., t] = -1 if by == "a document" else -np.inf
    case = case.change(np.broadcast_to(np.int32(np.arange(T) >= t * (by == "a document")), (3, T)), log_decay=decay)
    large = np.float32(1e6)
    moved = {
        name: np.concatenate([large * case.x[name][:, :t][:, ::-1], case.x[name][:, t:]], 1) for name in ("q", "values")
    }
    state = jax.tree.map(lambda x: large * np.abs(x), case.x["state"])
    cotangents = draw_cotangents(rng, form, case)
    (y, end), (other, other_end) = (
        run(form, each, cotangents)[0] for each in (case, case.change(**moved, state=state))
    )
    np.testing.assert_array_equal(y[:, t:], other[:, t:])
    jax.tree.map(np.testing.assert_array_equal, end, other_end)
    assert np.any(y[:, :t] != other[:, :t])


def test_betas_and_decays_of_zero_leave_the_state_as_it_is(rng):
    case = draw_case(rng, "delta", (2, 3), T, state=True)
    zero = np.zeros_like(case.x["beta"])
    case = case.change(beta=zero, log_decay=zero)
    y, (end,) = run(Form("delta"), case, draw_cotangents(rng, Form("delta"), case))[0]
    np.testing.assert_array_equal(end, case.x["state"][0])
    assert_close(y, case.x["q"] @ end, 1e-6)


@parametrize(*ATTENTION, Form("linear"), Form("delta"))
def test_gradients_of_extreme_decays_and_of_zeros_are_finite(form, rng):
    case = draw(rng, form, "decay, documents, state")
    cotangents = draw_cotangents(rng, form, case)
    for log_decay in (0.0, -1e-30, -200.0, -1e30, -np.inf):
        for zeros in (False, True):
            x = jax.tree.map(np.zeros_like, case.x) if zeros else case.x
            given = case.change(**x | {"log_decay": np.full_like(x["log_decay"], log_decay)})
            assert all(np.isfinite(x).all() for x in jax.tree.leaves(run(form, given, cotangents)))


# ---- states --------------------------------------------------------------------------------------

merge_states, query_state = jax.jit(heinsen.merge_states), jax.jit(heinsen.query_state)


@parametrize(Form("log"), Form("real"))
def test_states_of_disjoint_tokens_merge_in_any_order_and_grouping(form, rng):
    parts = [draw(rng, form, "all keys") for _ in range(3)]
    whole = parts[0].change(**{n: np.concatenate([part.x[n] for part in parts], axis=1) for n in ("k", "values")})
    cotangents = draw_cotangents(rng, form, whole)
    want, want_state = truth(form, whole, cotangents)[0]
    a, b, c = (form.state(run(form, part, cotangents)[0][1]) for part in parts)
    empty = init_state((2,), 4, 3, signed=form.signed)
    assert not np.allclose(a.h_z, b.h_z) and not np.allclose(b.h_z, c.h_z)
    for merged in (
        merge_states(merge_states(a, b), c),
        merge_states(a, merge_states(b, c)),
        merge_states(merge_states(c, a), b),
        merge_states(empty, merge_states(merge_states(b, c), a)),
        merge_states(merge_states(c, merge_states(b, a)), empty),
    ):
        for got, expected in zip(merged, want_state, strict=True):
            assert_close(got, expected)
        assert_close(query_state(merged, parts[0].x["q"]), want)


@pytest.mark.parametrize("kind", [LogState, MeanState])
def test_a_merge_with_the_empty_state_changes_nothing_and_has_finite_gradients(rng, kind):
    state = kind(*(rng.standard_normal(shape).astype(np.float32) for shape in ((2, 4, 3), (2, 4))))
    empty = init_state((2,), 4, 3, signed=kind is MeanState)
    for merged in (merge_states(state, empty), merge_states(empty, state)):
        jax.tree.map(np.testing.assert_array_equal, merged, state)
    pull = jax.jit(lambda a, b: jax.vjp(heinsen.merge_states, a, b)[1](jax.tree.map(jnp.ones_like, a)))
    for got, want in zip(pull(state, empty), (1, 0), strict=True):
        for part in got:
            assert_close(part, np.full(part.shape, want), 1e-6)
    for gradient in jax.tree.leaves(pull(empty, empty)):
        np.testing.assert_array_equal(gradient, 0)


# ---- dtypes --------------------------------------------------------------------------------------


@parametrize(*CAUSAL)
def test_float64_inputs_have_float64_precision(form, rng):
    """What float32 rounds over shows here: the same computation to 1e-12."""
    case = draw(rng, form, "documents", batch=(3,), n_queries=5, d_key=3, d_value=3, mean_length=2, scale=2)
    with jax.enable_x64(True):
        case.x = jax.tree.map(np.float64, case.x)
        check(form, case, rng, 1e-12, 1e-12)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@parametrize(Form("log"), Form("real"), Form("linear"), Form("delta"), SIGMOID[0])
def test_half_precision_inputs_are_computed_in_float32(form, rng, dtype):
    case = draw(rng, form, "plain")
    half = jax.tree.map(lambda x: np.asarray(jnp.asarray(x, dtype)), case.x)
    rounded = jax.tree.map(np.float32, half)
    assert all(np.any(rounded[name] != case.x[name]) for name in case.x)
    y, state = jax.jit(form)(half)
    want, want_state = truth(form, case.change(**rounded), draw_cotangents(rng, form, case))[0]
    assert y.dtype == (dtype if form.signed else jnp.float32)
    assert_close(y, want, 2.0**-8 if form.signed else TOLERANCES["log"][0])
    for got, expected in zip(state, want_state, strict=True):
        assert got.dtype == jnp.float32
        assert_close(got, expected)
