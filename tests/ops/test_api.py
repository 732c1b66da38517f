"""What the public functions accept, refuse and return."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import heinsen
from heinsen import init_linear_state, init_state, merge_states, query_state, update_state
from heinsen.ops.api import IMPLEMENTATIONS, attend_both_ways
from heinsen.ops.delta import delta_rule, init_delta_state
from tests.ops.common import PORTABLE

T, K, V = 3, 2, 4


def zeros(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


Q, VALUES, IDS, BETA = zeros(2, T, K), zeros(2, T, V), zeros(2, T, dtype=jnp.int32), jnp.ones((2, T))
CALLS = {  # of q, k and values
    "log_attention": heinsen.log_attention,
    "attention": heinsen.attention,
    "linear_attention": heinsen.linear_attention,
    "sigmoid_attention": heinsen.sigmoid_attention,
    "sigmoid_attention_cached": functools.partial(heinsen.sigmoid_attention_cached, n=1),
    "delta_rule": lambda q, k, v, beta=BETA, **options: delta_rule(q, k, v, beta, **options),
}
LOGS, OF_SUMS = ("log_attention", "attention"), ("log_attention", "attention", "linear_attention")
SIGMOIDS, CACHED = ("sigmoid_attention", "sigmoid_attention_cached"), ("sigmoid_attention_cached",)
CAUSAL = tuple(name for name in CALLS if name not in CACHED)
STATES = {
    "log_attention": init_state,
    "attention": functools.partial(init_state, signed=True),
    "linear_attention": init_linear_state,
    "delta_rule": init_delta_state,
}

# ---- refusals ------------------------------------------------------------------------------------

REAL = "expected a real floating-point dtype of at least 16 bits"
FINITE = "expected a finite"
HEADS = dict(q=zeros(2, 2, T, K), k=zeros(2, 2, T, K), v=zeros(2, 2, T, V))  # as many heads as rows

# (functions, what is changed of valid arguments q, k, v, a part of the error)
REFUSED = [
    (CALLS, dict(q=zeros(2, T, K + 1)), "q and k differ in their last axis, the number of key features: q (2, 3, 3)"),
    (CALLS, dict(v=zeros(2, T + 1, V)), "differ in their number of tokens (axis -2)"),
    (CALLS, dict(v=zeros(1, T, V)), "differ in their leading axes"),
    (CALLS, dict(q=zeros(4, T, K)), "share one of k and"),  # the remedy: to repeat heads
    (CAUSAL, dict(q=zeros(2, T + 1, K)), "causal attention needs as many queries as keys: q (2, 4, 2)"),
    (CALLS, dict(q=zeros(K)), "q has shape (2,): expected [*batch, tokens, features], none of them empty"),
    (CALLS, dict(q=zeros(2, 0, K), k=zeros(2, 0, K), v=zeros(2, 0, V)), "none of them empty"),
    (CALLS, dict(q=zeros(2, T, 0), k=zeros(2, T, 0)), "none of them empty"),
    (CALLS, dict(v=zeros(2, T, 0)), "none of them empty"),
    (LOGS, dict(causal=False, v=zeros(2, T, 0)), "none of them empty"),
    *(
        (CALLS, {name: dict(q=Q, k=Q, v=VALUES)[name].astype(dtype)}, f"{name} has dtype {jnp.dtype(dtype)}: {REAL}")
        for name in "qkv"
        for dtype in (jnp.int32, jnp.complex64, bool, jnp.float8_e4m3fn, jnp.float8_e5m2)
    ),
    (OF_SUMS, dict(log_decay=zeros(2, T), causal=False), "a gate for each by heinsen.ops.api.attend_both_ways"),
    *(
        (names, {name: x}, message)
        for names, name in (((*OF_SUMS, "delta_rule"), "log_decay"), (("delta_rule",), "beta"))
        for x, message in (
            (zeros(2, T, dtype=int), f"{name} has dtype int32: {REAL}"),
            (Q, f"{name} (2, 3, 2) does not fit k (2, 3, 2): expected one number for each head and token"),
            (zeros(2, T - 1), f"{name} (2, 2) does not fit k (2, 3, 2): expected one number for each head and token"),
        )
    ),
    *((LOGS, dict(implementation="fast"), f"{name!r}") for name in ("fast", *IMPLEMENTATIONS)),
    (CAUSAL, dict(segment_ids=zeros(2, T)), "segment_ids has dtype float32: expected integers"),
    *(
        (
            CAUSAL,
            dict(segment_ids=jnp.zeros(shape, int)),
            f"segment_ids {shape} do not broadcast to [*batch, T] = (2, 3)",
        )
        for shape in ((T + 1,), (2, 1), (3, T), (1, 2, T), ())
    ),
    (CAUSAL, HEADS | dict(segment_ids=IDS, beta=zeros(2, 2, T)), "[B, 1, T]: pass segment_ids[:, None, :]"),
    (
        {*OF_SUMS, "sigmoid_attention"},
        dict(q=zeros(2, 1, K), causal=False, segment_ids=IDS),
        "segment_ids need as many queries as keys",
    ),
    *(
        (SIGMOIDS, {name: x}, f"{name} = {x!r}: {FINITE} number")
        for name in ("alpha", "bias")
        for x in (np.nan, np.inf, -np.inf, np.float32(np.nan))
    ),
    *(
        (SIGMOIDS, {name: x}, f"{name} = {x!r}: {FINITE} Python number")
        for name in ("alpha", "bias")
        for x in ("-log n", "log_n", None, True, 1j, jnp.ones(()))
    ),
    (SIGMOIDS, dict(bias="log_n"), f'{FINITE} Python number, or "-log_n"'),
    (CACHED, dict(n=1.0), "n has dtype float32: expected integers"),
    (CACHED, dict(n=jnp.ones(3, int)), "n (3,) does not broadcast to (2,)"),
    (CACHED, dict(offset=jnp.ones((1, 2), int)), "offset (1, 2) does not broadcast to (2,)"),
    (CACHED, dict(first=jnp.ones((2, 1, 1), int)), "first (2, 1, 1) does not broadcast to (2, 3)"),
    *(
        ((name,), dict(state=init(*sizes), **options), f"{tuple(x.shape for x in init(*sizes))} does not fit")
        for name, init in STATES.items()
        for sizes in (((2,), K + 1, V), ((2,), K, V + 1), ((), K, V), ((1,), K, V), ((2,), 1, V), ((2,), K, 1))
        for options in (dict(), *[dict(causal=False)] * (name == "linear_attention"))
    ),
    *(
        ((name,), dict(state=state), f"state is a {type(state).__name__}: expected a {wanted}")
        for name, wanted in zip(STATES, ("LogState", "MeanState", "LinearState", "DeltaState"), strict=True)
        for state in (
            *(init((2,), K, V) for other, init in STATES.items() if other != name),
            tuple(init_state((2,), K, V)),
        )
    ),
]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.wrong_types
def test_what_does_not_fit_is_refused_by_name(name):
    of_log_values = lambda message: message.replace("v has", "log_v has") if name == "log_attention" else message
    call, valid = CALLS[name], dict(q=Q, k=Q, v=VALUES)
    jax.eval_shape(lambda: call(*valid.values()))
    for names, changes, message in REFUSED:
        if name not in names:
            continue
        if name != "delta_rule":
            changes = {argument: x for argument, x in changes.items() if argument != "beta"}
        q, k, v = (changes.get(argument, x) for argument, x in valid.items())
        options = {argument: x for argument, x in changes.items() if argument not in valid}
        with pytest.raises((TypeError, ValueError)) as error:
            call(q, k, v, **options)
        assert of_log_values(message) in str(error.value), changes
        is_type = re.search("has dtype|is a |Python number", message) is not None
        assert isinstance(error.value, TypeError) == is_type, changes


@pytest.mark.wrong_types
def test_numbers_that_are_no_floats_are_numbers():
    for value in (np.float32(0.5), 2):
        for name in SIGMOIDS:
            assert jax.eval_shape(functools.partial(CALLS[name], alpha=value, bias=value), Q, Q, VALUES).shape == (
                2,
                T,
                V,
            )
    assert callable(attend_both_ways)


def public_calls():
    """Public functions that take arrays, with arguments that they accept."""
    ids, decay, decay_of_token = zeros(2, T, dtype=jnp.int32), zeros(2, T), zeros(2)
    both = {"q": zeros(2, T, K), "k": zeros(2, T, K), "segment_ids": ids}
    token = {"k": zeros(2, K), "values": zeros(2, V), "log_decay": decay_of_token}
    state, linear = init_state((2,), K, V), init_linear_state((2,), K, V)
    with_v = both | {"v": zeros(2, T, V)}
    return {
        "log_attention": both | {"log_v": zeros(2, T, V), "log_decay": decay, "state": state},
        "attention": with_v | {"log_decay": decay, "state": init_state((2,), K, V, signed=True)},
        "linear_attention": with_v | {"log_decay": decay, "state": linear},
        "sigmoid_attention": with_v,
        "sigmoid_attention_cached": with_v | {"n": zeros(2, dtype=jnp.int32), "first": ids, "segment_ids": None},
        "update_state": token | {"state": state},
        "extend_context": token | {"q": zeros(2, T, K), "state": state},
        "query_state": {"state": state, "q": zeros(2, K)},
        "merge_states": {"older": state, "newer": state, "log_decay": decay_of_token},
    }


@pytest.mark.parametrize("name", public_calls())
@pytest.mark.wrong_types
def test_what_is_no_array_or_no_state_is_refused_by_name(name):
    function, arguments = getattr(heinsen, name), {k: x for k, x in public_calls()[name].items() if x is not None}
    jax.eval_shape(functools.partial(function, **arguments))
    optional = {n for n, p in inspect.signature(function).parameters.items() if p.default is None}
    for argument, x in arguments.items():
        if isinstance(x, tuple):
            wrong = [tuple(x), x._replace(h_z=[0.0]) if hasattr(x, "h_z") else x._replace(sums=[0.0])]
            wrong += [jax.tree.map(lambda part, dtype=dtype: part.astype(dtype), x) for dtype in (int, jnp.float8_e5m2)]
        else:
            wrong = [x.tolist(), "text", zeros(*x.shape, dtype=jnp.float8_e4m3fn), zeros(*x.shape, dtype=complex)]
        for each in [*wrong, *([] if argument in optional else [None])]:
            with pytest.raises(TypeError, match=rf"^{argument}(\.\w+)? (is a \w+|has dtype \w+): expected "):
                function(**arguments | {argument: each})


@pytest.mark.parametrize("init", STATES.values(), ids=STATES)
@pytest.mark.wrong_types
def test_states_of_other_dtypes_are_not_begun(init):
    for dtype in (int, bool, jnp.complex64, jnp.float8_e4m3fn):
        with pytest.raises(TypeError, match=f"the state has dtype {jnp.dtype(dtype)}: expected a real floating-point"):
            init((2,), K, V, dtype=dtype)


@pytest.mark.parametrize("sizes", [((2,), 1, V), ((2,), K, 1), ((1,), K, V), ((), K, V)])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.wrong_types
def test_states_do_not_broadcast(sizes, signed):
    """What broadcasts without an error is a sum over other tokens than the caller meant."""
    state, other = init_state((2,), K, V, signed=signed), init_state(*sizes, signed=signed)
    shapes = [re.escape(str(tuple(x.shape for x in each))) for each in (state, other)]
    for pair, (a, b) in (((state, other), shapes), ((other, state), shapes[::-1])):
        with pytest.raises(ValueError, match=f"states of different shapes cannot be merged: {a} and {b}"):
            merge_states(*pair)
    torn = type(state)(state[0], other.h_z)
    if torn.h_z.shape != state.h_z.shape:
        calls = [lambda: merge_states(state, torn), lambda: query_state(torn, zeros(2, K))]
        for call in [*calls, lambda: update_state(torn, zeros(2, K), zeros(2, V))]:
            with pytest.raises(ValueError, match=r"(state|newer) has shapes .*: expected those of heinsen.init_state"):
                call()


@pytest.mark.wrong_types
def test_steps_that_do_not_fit_a_state_are_refused():
    state = init_state((2,), K, V)
    with pytest.raises(ValueError, match="update_state takes one token"):
        update_state(state, zeros(2, T, K), zeros(2, T, V))
    with pytest.raises(ValueError, match="do not fit a state"):
        update_state(state, zeros(2, K), zeros(2, V + 1))
    for shape in ((2, K + 1), (2, T, K + 1), (3, T, K)):
        with pytest.raises(ValueError, match="do not fit a state"):
            query_state(state, zeros(*shape))
    with pytest.raises(TypeError, match="LogState and MeanState"):
        merge_states(state, init_state((2,), K, V, signed=True))
    with pytest.raises(ValueError, match=r"log_decay \(1,\) does not fit states"):
        merge_states(state, state, log_decay=zeros(1))


# ---- what is returned ------------------------------------------------------------------------------


def test_implementations_differ_in_code_and_are_named_in_the_documentation():
    assert len(set(IMPLEMENTATIONS.values())) == len(IMPLEMENTATIONS) >= 2
    for name in IMPLEMENTATIONS:
        assert f'"{name}"' in inspect.getdoc(heinsen.log_attention)


@pytest.mark.parametrize("name", OF_SUMS)
def test_state_is_returned_only_when_asked_for_and_calls_are_pure(name, rng):
    arrays = [np.float32(rng.standard_normal(x.shape)) for x in (Q, Q, VALUES)]
    before = [x.copy() for x in arrays]
    call = jax.jit(CALLS[name], static_argnames="return_state")
    y = call(*arrays)
    assert isinstance(y, jax.Array)
    also_y, state = call(*arrays, return_state=True)
    np.testing.assert_array_equal(also_y, y)
    assert type(state) is type(STATES[name]((2,), K, V))
    np.testing.assert_array_equal(call(*arrays, state=STATES[name]((2,), K, V)), y)
    jax.tree.map(np.testing.assert_array_equal, arrays, before)


def test_init_state_is_the_state_of_nothing():
    log_state, mean_state = init_state((2, 3), K, V), init_state((2, 3), K, V, signed=True)
    assert log_state.h_s.shape == mean_state.mean.shape == (2, 3, K, V)
    assert log_state.h_z.shape == mean_state.h_z.shape == (2, 3, K)
    assert np.all(log_state.h_s == -np.inf) and np.all(log_state.h_z == -np.inf)
    assert np.all(mean_state.mean == 0) and np.all(mean_state.h_z == -np.inf)
    assert np.all(jax.jit(query_state)(log_state, zeros(2, 3, K)) == -np.inf)
    assert np.all(jax.jit(query_state)(mean_state, zeros(2, 3, K)) == 0)
    assert init_state((), K, V, dtype=jnp.bfloat16).h_s.dtype == jnp.bfloat16


@pytest.mark.parametrize("signed", [False, True])
def test_a_state_keeps_its_dtype_in_a_loop_of_updates(rng, signed):
    """Each update is that in float32, rounded."""
    k, values = jnp.asarray(rng.standard_normal((T, 2, K)), "f4"), jnp.asarray(rng.standard_normal((T, 2, V)), "f4")
    begin = init_state((2,), K, V, signed=signed, dtype=jnp.bfloat16)
    end = jax.lax.fori_loop(0, T, lambda i, state: update_state(state, k[i], values[i]), begin)
    want = begin
    for i in range(T):
        exact = update_state(jax.tree.map(lambda x: x.astype(jnp.float32), want), k[i], values[i])
        want = jax.tree.map(lambda x: x.astype(jnp.bfloat16), exact)
    for got, expected in zip(end, want, strict=True):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.float32(got), np.float32(expected), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("implementation", PORTABLE)
@pytest.mark.parametrize("options", [(), ("log_decay", "segment_ids", "state")])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", LOGS)
def test_float32_stays_float32_where_float64_is_enabled(name, implementation, options, causal):
    q, v, function = zeros(2, 3, 9, K), zeros(2, 3, 9, V), CALLS[name]
    given = dict(log_decay=q[..., 0], segment_ids=zeros(2, 1, 9, dtype=jnp.int32))
    given["state"] = STATES[name]((2, 3), K, V)
    given = {option: given[option] for option in options if causal or option != "log_decay"}

    def run(q, k, v):
        y, state = function(q, k, v, causal=causal, implementation=implementation, return_state=True, **given)
        return jnp.sum(y), (y, state)

    with jax.enable_x64(True):
        found = jax.eval_shape(jax.grad(run, (0, 1, 2), has_aux=True), q, q, v)
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype(jnp.float32)}


def test_attention_returns_the_dtype_of_the_values():
    shape_of = lambda *arrays: jax.eval_shape(heinsen.attention, *arrays)
    assert shape_of(Q.astype(jnp.bfloat16), Q, VALUES).dtype == jnp.float32
    assert shape_of(Q, Q, VALUES.astype(jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("name", CAUSAL)
def test_segment_ids_broadcast_over_leading_axes(name, rng):
    arrays, ids = [np.float32(rng.standard_normal(x.shape)) for x in (Q, Q, VALUES)], np.array([0, 0, 1], np.int32)
    options = {"implementation": "reference"} if name in LOGS else {}
    run = jax.jit(lambda ids: jax.tree.leaves(CALLS[name](*map(jnp.asarray, arrays), segment_ids=ids, **options))[0])
    want = run(np.stack([ids, ids]))
    for smaller in (ids, ids[None]):
        np.testing.assert_array_equal(run(smaller), want)
    assert np.abs(run(np.zeros(3, np.int32)) - want).max() > 1e-4
