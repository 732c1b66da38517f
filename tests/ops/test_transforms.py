"""JAX's transformations of every kind of attention: outside jit, mapped, on meshes, exported, of every order."""

import functools
import logging
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import heinsen
from tests.arrays import to_jax
from tests.ops.common import PORTABLE
from tests.ops.oracle import TOLERANCES, Form, assert_close, assert_gradients_close, draw_case, draw_cotangents, truth

ROOT = Path(__file__).parents[2]
OPTIONS = {
    "causal": dict(),
    "all options": dict(decay=True, mean_length=5, state=True),
    "all keys": dict(causal=False),
    "all keys of documents": dict(causal=False, mean_length=5),
}
# Both kinds of values run the same loops: the second one takes the options together.
CASES = [(kind, option) for kind in ("log", "linear") for option in OPTIONS]
CASES += [("real", "all options"), ("real", "all keys"), ("sigmoid", "causal"), ("sigmoid", "all keys")]
CASES += [("sigmoid", "all keys of documents"), ("delta", "all options")]
# Those that have every loop between them: others outside jit and on meshes are among the long tests.
LOOPS = [("log", "causal"), ("real", "all keys"), ("linear", "all options"), ("sigmoid", "causal")]
LOOPS += [("delta", "all options")]


def draw(rng, kind, option, batch=(4, 2), n_queries=40, **changes):
    """(the form with chunks of the real size, a case, a cotangent of y)."""
    form = Form(kind, small=False)
    case = draw_case(rng, kind, batch, n_queries, d_key=3, d_value=5, **OPTIONS[option], **changes)
    case.x, case.ids = to_jax((case.x, case.ids))
    return form, case, to_jax(draw_cotangents(rng, form, case)[0])


def loss_and_gradients(form, causal):
    """Of x, ids and a cotangent: sum(g * y), with its gradients by all of x."""
    return jax.value_and_grad(lambda x, ids, g: jnp.sum(g * form(x, ids, causal)[0]))


def assert_true(got, form, case, g):
    _, *of_state = jax.tree.map(jnp.zeros_like, to_jax(draw_cotangents(np.random.default_rng(0), form, case)))
    (y, _), gradients = truth(form, case, (g, *of_state))
    assert_close(got[0], np.vdot(g, y), 1e-5, "loss", floor=10.0)
    assert_gradients_close(got[1], gradients, case, form, TOLERANCES[form.kind][1])


# ---- eager, mapped, divided ----------------------------------------------------------------------


@pytest.mark.wrong_types  # the checks of shapes know no symbols
@pytest.mark.parametrize(
    "kind, option", [pytest.param(*x, marks=() if x in LOOPS else pytest.mark.long) for x in CASES]
)
def test_a_second_call_outside_jit_compiles_nothing_and_a_symbolic_batch_is_exported(rng, kind, option, caplog):
    form, case, g = draw(rng, kind, option)
    run, arguments = loss_and_gradients(form, case.causal), (case.x, case.ids, g)
    assert_true(run(*arguments), form, case, g)
    jax.config.update("jax_log_compiles", True)
    try:
        with caplog.at_level(logging.WARNING):
            run(*arguments)
            assert not [x for x in caplog.messages if "Compiling" in x]
            jax.jit(lambda x: x + 1)(case.x["q"])  # that a compilation is seen
            assert [x for x in caplog.messages if "Compiling" in x]
    finally:
        jax.config.update("jax_log_compiles", False)
    (batch,) = jax.export.symbolic_shape("batch")
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype), arguments)
    assert_true(jax.export.export(jax.jit(run))(*shapes).call(*arguments), form, case, g)


@pytest.mark.parametrize("form", [*(Form(k, (("implementation", i),)) for k in ("log", "real") for i in PORTABLE),
                                  Form("linear"), Form("sigmoid"), Form("delta")], ids=str)  # fmt: skip
def test_jit_vmap_grad_and_checkpoint_compose(form, rng):
    """Gradients of a recomputed call, mapped over sequences and their documents, are those of the whole."""
    option = "all options" if form.kind in ("delta", "linear") else "causal"
    documents = {} if option == "all options" else {"mean_length": 4}
    _, case, g = draw(rng, form.kind, option, batch=(2,), n_queries=11, **documents)
    form_again = jax.checkpoint(form, static_argnums=2)
    run = jax.jit(jax.vmap(loss_and_gradients(form_again, case.causal)))
    losses, gradients = run(case.x, case.ids, g)
    assert_true((losses.sum(), gradients), form, case, g)


@pytest.mark.parametrize("kind", ["log", "real"])
def test_vmap_over_some_arguments_only(kind, rng):
    """One set of keys, many sets of queries; one state, many continuations; documents of each its own."""
    _, case, _ = draw(rng, kind, "causal", batch=(2,), n_queries=11, state=True, mean_length=4)
    form, one = Form(kind, (("implementation", "reference"),)), {"q": 0, "k": None, "values": None, "state": None}
    run = jax.vmap(lambda x, ids: form(x, ids)[0], in_axes=(one, 0))
    y = jax.jit(run)(case.x | {n: jax.tree.map(lambda x: x[0], case.x[n]) for n in ("k", "values", "state")}, case.ids)
    same = case.change(
        **jax.tree.map(lambda x: x[:1].repeat(2, axis=0), {n: case.x[n] for n in ("k", "values", "state")})
    )
    assert_close(y, truth(form, same, draw_cotangents(rng, form, same))[0][0])


@pytest.mark.parametrize("kind", ["log", "real"])
def test_compilation_changes_nothing_and_no_intermediate_result_is_nan(kind, rng):
    """Run operation by operation, with a masked token, each checked for NaN; then compiled as a whole."""
    form, case, _ = draw(rng, kind, "causal", batch=(2,), n_queries=2)
    case.x["k"] = case.x["k"].at[0, 0].set(-jnp.inf)  # the first query of the first sequence sees nothing
    with jax.debug_nans(True):
        y = np.asarray(form(case.x)[0])
    assert np.all(y[0, 0] == (0 if form.signed else -np.inf))
    assert_close(jax.jit(form)(case.x)[0], y, 1e-6)


def check_meshes(seed, cases):
    """On 4 devices, within shard_map and on a mesh with explicit axes."""
    rng = np.random.default_rng(seed)
    mesh, explicit = (jax.make_mesh((4,), ("batch",), axis_types=(x,)) for x in (AxisType.Auto, AxisType.Explicit))
    for kind, option in cases:
        form, case, g = draw(rng, kind, option)
        run, arguments = loss_and_gradients(form, case.causal), (case.x, case.ids, g)
        total = lambda x, ids, g, form=form, case=case: jax.lax.psum(jnp.sum(g * form(x, ids, case.causal)[0]), "batch")
        part = jax.shard_map(total, mesh=mesh, in_specs=P("batch"), out_specs=P())
        assert_true(jax.jit(jax.value_and_grad(part))(*arguments), form, case, g)
        with jax.set_mesh(explicit):
            found = jax.jit(run)(*jax.device_put(arguments, NamedSharding(explicit, P("batch"))))
        assert_true(found, form, case, g)


@pytest.mark.parametrize("cases", ["LOOPS", pytest.param("CASES", marks=pytest.mark.long)])
def test_shard_map_and_explicit_axes_change_nothing(request, cases):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    seed = request.config.option.seed
    code = f"from tests.ops import test_transforms as test; test.check_meshes({seed}, test.{cases})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"--seed={seed}: {done.stderr}"


# ---- derivatives ---------------------------------------------------------------------------------

FORMS = [("chunked", 1), ("chunked", 40), ("scan", 1)]  # with the scale of inputs: exponents that spread
ORDERS = [(*form, kind, option) for form in FORMS for kind in ("log", "real") for option in OPTIONS]
QUICK = [("chunked", 1, "log", "all options"), ("chunked", 40, "real", "causal")]


@pytest.mark.parametrize(
    "implementation, scale, kind, option",
    [pytest.param(*x, marks=() if x in QUICK else pytest.mark.long) for x in ORDERS],
)
def test_derivatives_in_both_modes_and_of_every_order(rng, implementation, scale, kind, option):
    """By q, k and values, in float64; the first derivatives outside jit too."""
    form = Form(kind, (("implementation", implementation),))
    case, found = draw_case(rng, kind, (2,), 6, d_key=3, **OPTIONS[option]), []
    with jax.enable_x64(True):
        x = jax.tree.map(jnp.float64, case.x)
        arrays = tuple(scale * x[name] for name in ("q", "k", "values"))
        along = tuple(jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape) for x in arrays)
        for function in (form, form.law):

            def loss(q, k, values, function=function):
                y, _ = function(x | {"q": q, "k": k, "values": values}, to_jax(case.ids), case.causal)
                return jnp.mean(jnp.square(y))

            grad = jax.grad(loss, argnums=(0, 1, 2))
            slope = lambda *args, grad=grad: sum(map(jnp.vdot, grad(*args), along))
            forward = lambda *args, loss=loss: jax.jvp(loss, args, along)[1]

            def all_orders(*args, loss=loss, grad=grad, slope=slope, forward=forward):
                return {
                    "forward": forward(*args),
                    "linearized": jax.linearize(loss, *args)[1](*along),
                    "forward over reverse": jax.jvp(grad, args, along)[1],
                    "reverse over reverse": jax.grad(slope, argnums=(0, 1, 2))(*args),
                    "reverse over forward": jax.grad(forward, argnums=(0, 1, 2))(*args),
                }

            found.append(jax.tree.map(np.asarray, jax.jit(all_orders)(*arrays)))
            if function is form:
                for eager in (forward(*arrays), slope(*arrays)):
                    np.testing.assert_allclose(eager, found[0]["forward"], rtol=1e-7, atol=1e-10)
    got, want = found
    same = lambda tolerance, x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance / 1000)
    jax.tree.map(functools.partial(same, 1e-7), got, want)
    # Of many numbers: a single derivative along one direction can be small by chance. Where inputs spread, all weights
    # can be 0 or 1, and then derivatives by q and k vanish.
    largest = [np.max(np.abs(x)) for x in want["forward over reverse"]]
    assert (min if scale == 1 else max)(largest) > 1e-4
    for way in ("reverse over reverse", "reverse over forward"):
        jax.tree.map(functools.partial(same, 1e-5), got[way], got["forward over reverse"])


def test_sigmoid_attention_has_the_forward_derivative_of_its_gradient_alone(rng):
    form, case, _ = draw(rng, "sigmoid", "causal")
    with jax.enable_x64(True):
        x = jax.tree.map(jnp.float64, case.x)
        along = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape)), x)
        of = lambda function: jax.grad(lambda x: jnp.mean(jnp.square(function(x, None, True)[0])))
        got, want = (jax.jit(lambda x, f=f: jax.jvp(of(f), (x,), (along,))[1])(x) for f in (form, form.law))
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-7, atol=1e-10), got, want)
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jvp(lambda x: form(x)[0], (x,), (along,))


@pytest.mark.parametrize("kind, option", [("log", "causal"), ("real", "all keys")])
def test_a_constant_cotangent_is_not_folded_when_compiling(rng, kind, option):
    """A reduction of a million constants takes XLA seconds, with an alarm."""
    form, case, w = draw(rng, kind, option, n_queries=64)
    run = jax.jit(lambda x: loss_and_gradients(form, case.causal)(x, None, w))
    text = run.lower(case.x).as_text()
    constants = {line.split(" = ")[0].strip() for line in text.splitlines() if 'stablehlo.constant dense<"0x' in line}
    reductions = [line for line in text.splitlines() if "stablehlo.reduce" in line or "stablehlo.abs" in line]
    assert constants and reductions  # w is there
    assert not [line for line in reductions if any(f"{name} " in f"{line} " for name in constants)]


@pytest.mark.wrong_types
@pytest.mark.parametrize("name", ["log_attention", "attention", "linear_attention", "sigmoid_attention"])
def test_a_symbolic_number_of_tokens_is_an_error_that_names_the_remedy(name):
    (tokens,) = jax.export.symbolic_shape("tokens")
    shape = jax.ShapeDtypeStruct((2, tokens, 4), jnp.float32)
    with pytest.raises(ValueError, match="symbolic number of tokens, .*export a function for each length"):
        jax.export.export(jax.jit(getattr(heinsen, name)))(shape, shape, shape)
