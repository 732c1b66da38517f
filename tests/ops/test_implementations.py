"""Every implementation of `log_attention` and `attention` against float64 truth, and the laws it must obey.

A new entry of `heinsen.ops.api.IMPLEMENTATIONS` is tested here without further ado, except "pallas", whose kernels need
a device: test_mosaic_gpu.py.
"""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import heinsen
from heinsen import LogState, MeanState, backend, init_state
from heinsen.ops.api import IMPLEMENTATIONS
from tests.ops.common import PORTABLE, split_small, user_jit
from tests.ops.truth import Case, assert_close, assert_gradients_close, draw_case, truth

# One compilation serves all tests with the same shapes.
merge_states, query_state = jax.jit(heinsen.merge_states), jax.jit(heinsen.query_state)


@dataclasses.dataclass(frozen=True)
class Form:
    """One of the two functions, in one implementation; `is_split` is whether tests have set the size of its chunks."""

    function: str
    implementation: str
    is_split: bool = False

    def __str__(self):
        return f"{self.function}-{self.implementation}"

    @property
    def signed(self):
        return self.function == "attention"

    def state(self, parts):
        return None if parts is None else (MeanState if self.signed else LogState)(*parts)

    def run(self, case: Case):
        """(y, state parts)."""
        return self.run_with_gradients(case, _ones(case))[:2]

    def y(self, case: Case, q=None, k=None, values=None):
        """y, with some of the case's arrays replaced."""
        replaced = {name: x for name, x in dict(q=q, k=k, values=values).items() if x is not None}
        return self.run(case._replace(**replaced))[0]

    def run_with_gradients(self, case: Case, cotangents):
        """y, state parts, gradients by q, k, values, log_decay (or None) and, where one came in, the state's parts."""
        case = case._replace(state=self.state(case.state))
        out, gradients = _evaluate(self, case.causal, case, (cotangents[0], self.state(cotangents[1:])))
        (y, state), (*inputs, of_state) = jax.tree.map(np.asarray, (out, gradients))
        return y, tuple(state), (*inputs, *(of_state or ()))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _evaluate(form, causal, case, cotangents):
    def call(q, k, values, log_decay, state):
        return getattr(heinsen, form.function)(
            q,
            k,
            values,
            log_decay=log_decay,
            causal=causal,
            state=state,
            segment_ids=case.segment_ids,
            implementation=form.implementation,
            return_state=True,
        )

    out, pull = jax.vjp(call, case.q, case.k, case.values, case.log_decay, case.state)
    return out, pull(cotangents)


@pytest.fixture(params=PORTABLE)
def implementation(request):
    return request.param


@pytest.fixture(params=["log_attention", "attention"])
def form(request, implementation, monkeypatch):
    """Each function in each implementation, with small chunks."""
    if implementation == "chunked":
        split_small(monkeypatch)
    return Form(request.param, implementation, implementation == "chunked")


T = 7
CASES = {
    "causal": dict(batch=(2,), n_queries=T),
    "state": dict(batch=(2, 2), n_queries=5, d_key=2, d_value=6, state=True),
    "one token, state": dict(batch=(2, 2), n_queries=1, d_key=2, d_value=6, state=True),
    "documents, state": dict(batch=(2,), n_queries=T, mean_length=3, state=True),
    "decay": dict(batch=(2,), n_queries=T, decay=True),
    "decay, documents, state": dict(batch=(3,), n_queries=T, mean_length=4, state=True, decay=True),
    "decay, one token, state": dict(batch=(2, 2), n_queries=1, d_key=2, d_value=6, state=True, decay=True),
    "all keys": dict(batch=(2,), n_queries=4, n_keys=T, causal=False),
    "all keys, one query, state": dict(n_queries=1, n_keys=5, d_key=1, d_value=1, causal=False, state=True),
    "all keys, documents, state": dict(
        batch=(2,),
        n_queries=11,  # the second half begins within a chunk
        d_key=5,
        causal=False,
        mean_length=6,
        state=True,
    ),
}
# The equations of cases with a state, documents or decays as well, or of more tokens, contain those of these.
COVERED = (
    "causal",
    "state",
    "one token, state",
    "documents, state",
    "decay",
    "decay, one token, state",
    "all keys",
)
LONG = dict(batch=(1, 4), n_queries=70, d_key=8, d_value=6, state=True)


def draw(rng, name, **changes):
    return draw_case(rng, **{**CASES[name], **changes})


def _cotangent_shapes(case):
    batch, (d_key, d_value) = case.k.shape[:-2], (case.k.shape[-1], case.values.shape[-1])
    return (*batch, case.q.shape[-2], d_value), (*batch, d_key, d_value), (*batch, d_key)


def _ones(case):
    return tuple(np.ones(shape, np.float32) for shape in _cotangent_shapes(case))


def draw_cotangents(rng, case):
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in _cotangent_shapes(case))


def check(form, case, rng, tolerance=1e-5, gradient_tolerance=1e-5):
    """Outputs, states and all gradients, those that come through the returned state among them."""
    cotangents = draw_cotangents(rng, case)
    want = truth(case, form.signed, cotangents)
    y, state, gradients = form.run_with_gradients(case, cotangents)
    assert y.dtype == np.float32 and all(part.dtype == np.float32 for part in state)
    assert_close(y, want.y, tolerance, "y")
    assert_close(state[0], want.state[0], tolerance, "state[0]")
    assert_close(state[1], want.state[1], tolerance, "h_z")
    assert_gradients_close(gradients, want.gradients, case, form.signed, gradient_tolerance)


# ---- the yardstick -----------------------------------------------------------------------------


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_truth_has_the_gradients_of_its_outputs(rng, causal, signed):
    """The closed forms used as truth below, against finite differences of the truth's own outputs."""
    case = draw_case(rng, (2,), 4, d_key=2, d_value=2, causal=causal, state=True, mean_length=2)
    decays = -rng.random((2, 4))
    case.segment_ids[0] = 0  # one document, through which the state passes, and several
    cotangents = draw_cotangents(rng, case)

    def loss(inputs):
        out = truth(Case(*inputs[:3], causal, tuple(inputs[4:]), case.segment_ids, inputs[3]), signed)
        return sum(np.sum(g * x) for g, x in zip(cotangents, (out.y, *out.state), strict=True))

    inputs = [np.asarray(x, np.float64) for x in (*case[:3], decays, *case.state)]
    gradients = truth(case._replace(log_decay=decays), signed, cotangents).gradients
    for x, gradient in zip(inputs, gradients, strict=True):
        numeric = np.zeros_like(x)
        for index in np.ndindex(x.shape):
            at, step = x[index], 1e-5
            x[index] = at + step
            numeric[index] = loss(inputs)
            x[index] = at - step
            numeric[index] = (numeric[index] - loss(inputs)) / (2 * step)
            x[index] = at
        assert_close(gradient, numeric, 1e-7)


def test_implementations_differ_in_code_and_are_named_in_the_documentation():
    assert len(set(IMPLEMENTATIONS.values())) == len(IMPLEMENTATIONS) >= 2
    for name in IMPLEMENTATIONS:
        assert f'"{name}"' in inspect.getdoc(heinsen.log_attention)


# ---- against the truth ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name in COVERED)) for name in CASES],
)
def test_outputs_states_and_gradients_are_the_truth(form, name, rng):
    check(form, draw(rng, name), rng)


@pytest.mark.parametrize("scale", [1, pytest.param(16, marks=pytest.mark.long), 32])
@pytest.mark.parametrize("function", ["log_attention", "attention"])
@pytest.mark.parametrize("name", [name for name in PORTABLE if name not in ("reference", "scan")])
def test_long_sequences_of_any_dynamic_range_are_the_truth(function, name, rng, scale):
    """With chunks of the real size. (Equations and scan are no other computation when T is larger.)"""
    check_wide(Form(function, name), draw_case(rng, **LONG, scale=scale), rng)


@pytest.mark.parametrize("batch, n_tokens", [((32, 4), 17), ((1, 4), 5)])
def test_gradients_of_few_chunks_with_a_leading_axis_of_1(batch, n_tokens, rng):
    """jaxlib 0.10.2 crashes in some fused operations on such arrays (docs/log/2026-11.md)."""
    q, k, v = (np.float32(scale * rng.standard_normal((*batch, n_tokens, 16))) for scale in (40, 40, 1))
    gradients = user_jit(jax.grad(lambda *x: jnp.sum(heinsen.attention(*x)), (0, 1, 2)))(q, k, v)
    assert all(np.all(np.isfinite(x)) for x in gradients)


@pytest.mark.parametrize("scale", [1, 32])
def test_the_chunks_of_accelerators_are_the_truth(rng, scale):
    case = draw_case(rng, (2, 4), 140, d_key=4, d_value=3, mean_length=30, decay=True, state=True, scale=scale)
    with backend.compiling_for("gpu"):
        (check_wide if scale > 1 else check)(Form("log_attention", "chunked"), case, rng)


@pytest.mark.parametrize("scale", [pytest.param(16, marks=pytest.mark.long), 32])
@pytest.mark.parametrize("name", ["causal", "documents, state", "all keys"])
def test_wide_dynamic_range(form, rng, name, scale):
    """Logarithms of some hundred, beyond exp's range in float32: nothing is lost, forward or backward."""
    case = draw(rng, name, scale=scale)
    assert np.ptp(case.q[..., :4, None, :] + case.k[..., None, :4, :]) > 60
    check_wide(form, case, rng)


def test_float64_inputs_have_float64_precision(form, rng):
    """What float32 rounds over shows here: the same computation, of documents without a state, to 1e-12."""
    case = draw_case(rng, (3,), 5, d_key=3, d_value=3, mean_length=2, scale=2)
    with jax.enable_x64(True):
        arrays = case._replace(segment_ids=None)
        case = jax.tree.map(np.float64, arrays)._replace(causal=case.causal, segment_ids=case.segment_ids)
        cotangents = tuple(map(np.float64, draw_cotangents(rng, case)))
        y, state, gradients = form.run_with_gradients(case, cotangents)
    want = truth(case, form.signed, cotangents)
    assert y.dtype == state[0].dtype == state[1].dtype == gradients[0].dtype == np.float64
    assert_close(y, want.y, 1e-12)
    assert_close(state[0], want.state[0], 1e-12)
    assert_close(state[1], want.state[1], 1e-12)
    assert_gradients_close(gradients, want.gradients, case, form.signed, 1e-12)


def check_wide(form, case, rng):
    """Logarithms of some hundred are known to 1e-5, and so are their exponentials."""
    cotangents = draw_cotangents(rng, case)
    want = truth(case, form.signed, cotangents)
    y, state, gradients = form.run_with_gradients(case, cotangents)
    if form.signed:
        assert_close(y, want.y, 5e-5, "y")
    else:
        assert np.all(np.isfinite(y)) and np.abs(y - want.y).max() < 1e-4
    assert_close(state[0], want.state[0], 5e-5, "state[0]")
    assert_close(state[1], want.state[1], 1e-6, "h_z")
    assert_gradients_close(gradients, want.gradients, case, form.signed, 2e-4)


def test_the_next_document_may_begin_lower_than_exp_can_hold(form, rng):
    """The sums fall by 200 nats where the second document begins, and rise by 100 with the third."""
    case = draw(rng, "documents, state")
    case.segment_ids[...] = [0, 0, 1, 1, 1, 2, 2]
    case.k[..., :2, :] += 100
    case.k[..., 2:5, :] -= 100
    check(form, case, rng, 2e-5, 2e-4)


# ---- what is masked ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["causal", "documents, state", "all keys"])
def test_masked_keys_and_zero_values_have_the_truth_with_finite_gradients(form, rng, name):
    case = draw(rng, name)
    case.k[..., 0, :] = -np.inf  # a whole token; without a state the first query sees nothing
    case.k[..., 3, :] = -np.inf
    case.k[0, 5, 1:3] = -np.inf  # some features of a token
    case.k[1, :, 0] = -np.inf  # a feature of all tokens
    case.q[0, 2, 2] = -np.inf
    case.q[1, 3, :] = -np.inf  # a query of nothing
    if not form.signed:
        case.values[..., 2, :] = -np.inf
        case.values[0, :, 1] = -np.inf  # a value that is always zero
    if case.state is not None:
        case.state[1][0, 3] = -np.inf
        case.state[0][0, 3] = 0 if form.signed else -np.inf
    want = truth(case, form.signed).y
    nothing = 0 if form.signed else -np.inf
    assert np.all(want[1, 3] == nothing) and (name != "causal" or np.all(want[:, 0] == nothing))
    check(form, case, rng)


@pytest.mark.parametrize("name", ["causal", "documents, state", "all keys"])
def test_everything_masked_is_nothing(form, rng, name):
    case = draw(rng, name)
    case.k[...] = -np.inf
    if case.state is not None:
        case.state[1][...] = -np.inf
        case.state[0][...] = 0 if form.signed else -np.inf
    assert np.all(form.y(case) == (0 if form.signed else -np.inf))
    check(form, case, rng)


def test_values_all_zero_are_zero(form, rng):
    case = draw(rng, "causal")
    case.values[...] = 0 if form.signed else -np.inf
    assert np.all(form.y(case) == (0 if form.signed else -np.inf))
    check(form, case, rng)


def test_a_masked_token_is_a_removed_token(form, rng):
    case = draw(rng, "causal")
    stays = np.arange(T) != rng.integers(1, T)
    k = np.where(stays[:, None], case.k, -np.inf).astype(np.float32)
    removed = case._replace(q=case.q[:, stays], k=case.k[:, stays], values=case.values[:, stays])
    y = form.y(case, k=k)
    assert_close(y[:, stays], truth(removed, form.signed).y)
    assert np.abs(y - form.y(case)).max() > 1e-4


# ---- documents -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, lengths",
    [("documents, state", (1, 4, 2)), ("all keys, documents, state", (1, 7, 3))],
)
def test_packed_documents_are_separate_calls_and_runs_decide(form, rng, name, lengths):
    """Ids 0, 1, 0: three documents; the state goes into the first only, and the last one's comes out."""
    case = draw(rng, name)
    case.segment_ids[...] = np.repeat([0, 1, 0], lengths)
    y, state = form.run(case)
    ends = np.cumsum(lengths)
    for number, (start, end) in enumerate(zip(ends - lengths, ends, strict=True)):
        q, k, values = (x[:, start:end] for x in case[:3])
        own = truth(Case(q, k, values, case.causal, None if number else case.state, None), form.signed)
        assert_close(y[:, start:end], own.y)
    for got, want in zip(state, own.state, strict=True):
        assert_close(got, want)
    assert np.abs(y - truth(case._replace(segment_ids=None), form.signed).y).max() > 1e-3


def test_only_changes_of_the_ids_matter(form, rng):
    case, other = draw(rng, "documents, state"), np.empty((2, T), np.int32)
    case.segment_ids[...] = [[4, 4, 4, 7, 7, 4, 4], [0, 1, 1, 1, 1, 1, 1]]
    other[...] = [[-1, -1, -1, 3, 3, 0, 0], [9, 8, 8, 8, 8, 8, 8]]
    y, state = form.run(case)
    other_y, other_state = form.run(case._replace(segment_ids=other))
    np.testing.assert_array_equal(y, other_y)
    np.testing.assert_array_equal(state[0], other_state[0])
    assert not np.array_equal(y, form.run(case._replace(segment_ids=other[::-1].copy()))[0])


def test_one_document_is_no_documents(form, rng):
    case = draw(rng, "documents, state")
    case.segment_ids[...] = rng.integers(100)
    want = truth(case._replace(segment_ids=None), form.signed)
    y, state = form.run(case)
    assert_close(y, want.y)
    assert_close(state[0], want.state[0])


# ---- states --------------------------------------------------------------------------------------


@pytest.mark.long
def test_uneven_pieces_handing_on_the_state_equal_one_call(form, rng):
    """With decays, which contains the equations without. (States are the truth above, coming in and going out.)"""
    lengths, shapes, start = (1, 5, 1, 1, 5), set(), 0
    whole = draw(rng, "decay, one token, state", n_queries=sum(lengths))
    want, state = truth(whole, form.signed), whole.state
    for length in lengths:
        part = slice(start, start + length)
        q, k, values = (x[..., part, :] for x in whole[:3])
        y, state = form.run(Case(q, k, values, True, state, None, whole.log_decay[..., part]))
        assert_close(y, want.y[..., part, :])
        start += length
        shapes.add(q.shape)
    assert draw(rng, "decay, one token, state").q.shape in shapes and len(shapes) == 2  # are compiled
    for got, expected in zip(state, want.state, strict=True):
        assert_close(got, expected)


def test_states_of_disjoint_tokens_merge_in_any_order_and_grouping(form, rng):
    parts = [draw(rng, "all keys") for _ in range(3)]
    k, values = (np.concatenate([getattr(part, name) for part in parts], axis=1) for name in ("k", "values"))
    want = truth(parts[0]._replace(k=k, values=values), form.signed)
    a, b, c = (form.state(form.run(part)[1]) for part in parts)
    empty = init_state((2,), 4, 3, signed=form.signed)
    assert not np.allclose(a.h_z, b.h_z) and not np.allclose(b.h_z, c.h_z)
    for merged in (
        merge_states(merge_states(a, b), c),
        merge_states(a, merge_states(b, c)),
        merge_states(merge_states(c, a), b),
        merge_states(empty, merge_states(merge_states(b, c), a)),
        merge_states(merge_states(c, merge_states(b, a)), empty),
    ):
        for got, expected in zip(merged, want.state, strict=True):
            assert_close(got, expected)
        assert_close(query_state(merged, parts[0].q), want.y)


@pytest.mark.parametrize("signed", [False, True])
def test_a_merge_with_the_empty_state_changes_nothing_and_has_finite_gradients(rng, signed):
    mean_or_h_s, h_z = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 4, 3), (2, 4)))
    state = (MeanState if signed else LogState)(mean_or_h_s, h_z)
    empty = init_state((2,), 4, 3, signed=signed)
    for merged in (merge_states(state, empty), merge_states(empty, state)):
        for got, want in zip(merged, state, strict=True):
            np.testing.assert_array_equal(got, want)
    pull = jax.jit(lambda a, b: jax.vjp(heinsen.merge_states, a, b)[1](jax.tree.map(jnp.ones_like, a)))
    for got, want in zip(pull(state, empty), (1, 0), strict=True):
        for part in got:
            assert_close(part, np.full(part.shape, want), 1e-6)
    for gradient in jax.tree.leaves(pull(empty, empty)):
        np.testing.assert_array_equal(gradient, 0)


# ---- laws ------------------------------------------------------------------------------------------


def test_a_shift_of_a_query_changes_nothing(form, rng):
    case = draw(rng, "causal")
    shift = rng.uniform(1, 5, (2, T, 1)).astype(np.float32)
    assert_close(form.y(case, q=case.q + shift), np.float64(form.y(case)))


def test_a_shift_of_all_keys_changes_nothing(form, rng):
    case = draw(rng, "causal")
    shift = np.float32(rng.uniform(1, 5))
    assert_close(form.y(case, k=case.k + shift), np.float64(form.y(case)))


def test_a_key_feature_may_be_shifted_against_its_query_feature(form, rng):
    case = draw(rng, "causal")
    shift = rng.uniform(-3, 3, 4).astype(np.float32)
    y = np.float64(form.y(case))
    assert_close(form.y(case, q=case.q - shift, k=case.k + shift), y)
    assert np.abs(form.y(case, k=case.k + shift) - y).max() > 1e-4


def test_a_change_of_the_values_is_that_of_the_output(form, rng):
    """log v + b adds b to log y, column by column; a v + b gives a y + b."""
    case = draw(rng, "causal")
    a, b = rng.uniform(1, 3, (2, 3)).astype(np.float32)
    a = a if form.signed else 1
    assert_close(form.y(case, values=a * case.values + b), a * np.float64(form.y(case)) + b)


def test_outputs_lie_between_the_visible_values(form, rng):
    case = draw(rng, "causal")
    y = form.y(case)
    lowest, highest = (f.accumulate(case.values, axis=1) for f in (np.minimum, np.maximum))
    assert np.all(y >= lowest - 1e-5) and np.all(y <= highest + 1e-5)
    assert_close(y[:, 0], case.values[:, 0])
    everything = form.y(draw(rng, "all keys")._replace(values=case.values))
    assert np.all(everything >= lowest[:, -1:] - 1e-5) and np.all(everything <= highest[:, -1:] + 1e-5)


@pytest.mark.parametrize("changed", ["q", "k", "values"])
def test_no_output_depends_on_later_tokens(form, rng, changed):
    case, t = draw(rng, "causal"), int(rng.integers(1, T))
    x = getattr(case, changed)
    x[:, 0] = x.max(1)  # so that lowering another token changes no maximum over tokens, which would round differently
    lower = x.copy()
    lower[:, t] -= rng.uniform(1, 3, x[:, t].shape).astype(np.float32)
    lower[:, t, 0] -= 1
    y, other = form.y(case), form.y(case, **{changed: lower})
    np.testing.assert_allclose(other[:, :t], y[:, :t], rtol=0, atol=1e-6)
    assert np.abs(other[:, t] - y[:, t]).max() > 1e-5


def test_no_gradient_goes_to_later_tokens(form, rng):
    case, t = draw(rng, "causal"), int(rng.integers(0, T - 1))
    cotangents = [np.zeros_like(g) for g in _ones(case)]
    cotangents[0][:, t] = 1
    dq, dk, dvalues, _ = form.run_with_gradients(case, cotangents)[2]
    assert np.all(dq[:, np.arange(T) != t] == 0) and np.any(dvalues[:, t] != 0)
    assert np.all(dk[:, t + 1 :] == 0) and np.all(dvalues[:, t + 1 :] == 0)


def test_the_order_of_past_tokens_does_not_matter(form, rng):
    case, order = draw(rng, "causal"), np.append(rng.permutation(T - 1), T - 1)
    if np.array_equal(order, np.arange(T)):
        order[:2] = 1, 0
    y, permuted = form.y(case), form.y(case, k=case.k[:, order], values=case.values[:, order])
    assert_close(permuted[:, -1], np.float64(y[:, -1]))
    assert np.abs(permuted - y).max() > 1e-4


def test_the_last_causal_output_is_the_non_causal_one(form, rng):
    case = draw(rng, "causal")
    everything = form.y(Case(case.q[:, -4:], case.k, case.values, False, None, None))
    y = form.y(case)
    assert_close(y[:, -1], np.float64(everything[:, -1]))
    assert np.abs(y[:, -4:] - everything).max() > 1e-4
