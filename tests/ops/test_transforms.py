"""The public functions under JAX's transformations: outside jit, on meshes, exported, with constant cotangents."""

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
from heinsen.ops.delta import delta_rule
from heinsen.ops.linear import linear_attention
from tests.ops.common import split_small

ROOT = Path(__file__).parents[2]
FUNCTIONS = {
    "log_attention": heinsen.log_attention,
    "attention": heinsen.attention,
    "linear": linear_attention,
    "sigmoid": heinsen.sigmoid_attention,
}


def unit_delta_rule(q, k, v, return_state=False, **options):
    """The delta rule with unit keys, and betas that depend on them."""
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    y, after = delta_rule(q, k, v, jax.nn.sigmoid(k[..., 0]), **options)
    return (y, after) if return_state else y


OF_KEYS = FUNCTIONS | {"delta": unit_delta_rule}  # of queries, keys and values
OPTIONS = {
    "causal": dict(),
    "all options": dict(log_decay=True, segment_ids=True, state=True),
    "all keys": dict(causal=False),
    "all keys of documents": dict(causal=False, segment_ids=True),
}
# Both kinds of values run the same loops: the second one takes the options together.
CASES = [(name, option) for name in ("log_attention", "linear") for option in OPTIONS]
CASES += [("attention", "all options"), ("attention", "all keys"), ("sigmoid", "causal"), ("sigmoid", "all keys")]
CASES += [("sigmoid", "all keys of documents"), ("delta", "all options")]
# Those that have every loop between them: others on meshes are among the long tests.
LOOPS = [("log_attention", "causal"), ("attention", "all keys"), ("linear", "all options"), ("sigmoid", "causal")]
LOOPS += [("delta", "all options")]


def draw(rng, name, option, n_tokens=40, **given):
    """(the function's mean of squares, differentiable in all arrays; the arrays)."""
    given = OPTIONS[option] | given
    arrays = [jnp.asarray(rng.standard_normal((4, 2, n_tokens, n)), jnp.float32) for n in (3, 3, 5)]
    names = [key for key in ("log_decay", "segment_ids") if given.pop(key, False)]
    extra = {
        "log_decay": -jnp.asarray(rng.random((4, 2, n_tokens)), jnp.float32),
        "segment_ids": jnp.asarray(np.cumsum(rng.random((4, 1, n_tokens)) < 0.1, axis=-1)),
    }
    arrays += [extra[key] for key in names]
    function = OF_KEYS[name]
    if given.pop("state", False):
        before = [jnp.asarray(rng.standard_normal((4, 2, 7, n)), jnp.float32) for n in (3, 3, 5)]
        arrays.append(function(*before, return_state=True)[1])
        names.append("state")
    return lambda *arrays: jnp.mean(
        jnp.square(function(*arrays[:3], **dict(zip(names, arrays[3:], strict=True)), **given))
    ), arrays


def of_all(loss):
    """The loss and its gradients by q, k and values."""
    return jax.value_and_grad(loss, argnums=(0, 1, 2))


def assert_same(got, want):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), got, want)


@pytest.mark.wrong_types  # the checks of shapes know no symbols
@pytest.mark.parametrize(
    "name, option", [pytest.param(*x, marks=() if x in LOOPS else pytest.mark.long) for x in CASES]
)
def test_a_second_call_outside_jit_compiles_nothing_and_a_symbolic_batch_is_exported(rng, name, option, caplog):
    loss, arrays = draw(rng, name, option)
    want = of_all(loss)(*arrays)
    jax.config.update("jax_log_compiles", True)
    try:
        with caplog.at_level(logging.WARNING):
            of_all(loss)(*arrays)
            assert not [x for x in caplog.messages if "Compiling" in x]
            jax.jit(lambda x: x + 1)(arrays[0])  # that a compilation is seen
            assert [x for x in caplog.messages if "Compiling" in x]
    finally:
        jax.config.update("jax_log_compiles", False)
    (batch,) = jax.export.symbolic_shape("batch")
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype), arrays)
    assert_same(jax.export.export(jax.jit(of_all(loss)))(*shapes).call(*arrays), want)


@pytest.mark.parametrize("name, option", [("log_attention", "causal"), ("attention", "all keys")])
def test_a_constant_cotangent_is_not_folded_when_compiling(rng, name, option):
    """A reduction of a million constants takes XLA seconds, with an alarm."""
    loss = lambda w, *arrays: jnp.sum(FUNCTIONS[name](*arrays, **OPTIONS[option]) * w)
    arrays = [jnp.asarray(rng.standard_normal((4, 2, 64, 3)), jnp.float32) for _ in range(3)]
    w = jnp.asarray(rng.standard_normal((4, 2, 64, 3)), jnp.float32)
    text = jax.jit(jax.grad(functools.partial(loss, w), argnums=(0, 1, 2))).lower(*arrays).as_text()
    constants = {line.split(" = ")[0].strip() for line in text.splitlines() if 'stablehlo.constant dense<"0x' in line}
    reductions = [line for line in text.splitlines() if "stablehlo.reduce" in line or "stablehlo.abs" in line]
    assert constants and reductions  # w is there
    assert not [line for line in reductions if any(f"{name} " in f"{line} " for name in constants)]


def check_meshes(seed, cases):
    """On 4 devices, within shard_map and on a mesh with explicit axes: values and gradients of one device."""
    rng = np.random.default_rng(seed)
    mesh, explicit = (jax.make_mesh((4,), ("batch",), axis_types=(x,)) for x in (AxisType.Auto, AxisType.Explicit))
    for name, option in cases:
        loss, arrays = draw(rng, name, option)
        want = jax.jit(of_all(loss))(*arrays)
        mean = lambda *arrays, loss=loss: jax.lax.pmean(loss(*arrays), "batch")
        part = jax.shard_map(mean, mesh=mesh, in_specs=P("batch"), out_specs=P())
        assert_same(jax.jit(of_all(part))(*arrays), want)
        with jax.set_mesh(explicit):
            divided = jax.device_put(arrays, NamedSharding(explicit, P("batch")))
            assert_same(jax.jit(of_all(loss))(*divided), want)


@pytest.mark.parametrize("cases", ["LOOPS", pytest.param("CASES", marks=pytest.mark.long)])
def test_shard_map_and_explicit_axes_change_nothing(request, cases):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    seed = request.config.option.seed
    code = f"from tests.ops import test_transforms as test; test.check_meshes({seed}, test.{cases})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"--seed={seed}: {done.stderr}"


FORMS = [("chunked", 1), ("chunked", 40), ("scan", 1)]  # with the scale of inputs: exponents that spread
ORDERS = [(*form, name, option) for form in FORMS for name in ("log_attention", "attention") for option in OPTIONS]
QUICK = [("chunked", 1, "log_attention", "all options"), ("chunked", 40, "attention", "causal")]


@pytest.mark.parametrize(
    "form, scale, name, option", [pytest.param(*x, marks=() if x in QUICK else pytest.mark.long) for x in ORDERS]
)
def test_derivatives_in_both_modes_and_of_every_order(rng, form, scale, name, option, monkeypatch):
    """Against the reference in float64, by q, k and values; the first derivatives outside jit too."""
    split_small(monkeypatch)
    with jax.enable_x64(True):
        seed, found = rng.integers(2**32), []
        for implementation in (form, "reference"):
            loss, arrays = draw(np.random.default_rng(seed), name, option, 6, implementation=implementation)
            widen = lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
            arrays, others = jax.tree.map(widen, (tuple(scale * x for x in arrays[:3]), arrays[3:]))
            of = lambda *args, loss=loss, others=others: loss(*args, *others)
            along = tuple(jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape) for x in arrays)
            grad = jax.grad(of, argnums=(0, 1, 2))
            slope = lambda *args, grad=grad, along=along: sum(map(jnp.vdot, grad(*args), along))
            forward = lambda *args, of=of, along=along: jax.jvp(of, args, along)[1]

            def all_orders(*args, of=of, along=along, grad=grad, slope=slope, forward=forward):
                return {
                    "forward": forward(*args),
                    "linearized": jax.linearize(of, *args)[1](*along),
                    "forward over reverse": jax.jvp(grad, args, along)[1],
                    "reverse over reverse": jax.grad(slope, argnums=(0, 1, 2))(*args),
                    "reverse over forward": jax.grad(forward, argnums=(0, 1, 2))(*args),
                }

            found.append(jax.jit(all_orders)(*arrays))
            if implementation == form:
                for eager in (forward(*arrays), sum(map(jnp.vdot, grad(*arrays), along))):
                    np.testing.assert_allclose(eager, found[0]["forward"], rtol=1e-7, atol=1e-10)
        got, want = found
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-7, atol=1e-10), got, want)
        # Of many numbers: a single derivative along one direction can be small by chance.
        assert all(jnp.max(jnp.abs(x)) > 1e-4 for x in want["forward over reverse"])
        for way in ("reverse over reverse", "reverse over forward"):
            assert_same(got[way], got["forward over reverse"])


def test_sigmoid_attention_has_the_forward_derivative_of_its_gradient_alone(rng):
    with jax.enable_x64(True):
        loss, arrays = draw(rng, "sigmoid", "causal")
        arrays = tuple(x.astype(jnp.float64) for x in arrays)
        along = tuple(jnp.asarray(rng.standard_normal(x.shape)) for x in arrays)
        grad, step = jax.jit(jax.grad(loss, argnums=(0, 1, 2))), 1e-4
        moved = [grad(*(x + sign * step * dx for x, dx in zip(arrays, along, strict=True))) for sign in (1, -1)]
        got = jax.jit(lambda *args: jax.jvp(grad, args, along)[1])(*arrays)
        for x, up, down in zip(got, *moved, strict=True):
            np.testing.assert_allclose(x, (up - down) / (2 * step), rtol=1e-4, atol=1e-5 * jnp.max(jnp.abs(x)))
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jvp(loss, arrays, along)


@pytest.mark.wrong_types
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_symbolic_number_of_tokens_is_an_error_that_names_the_remedy(name):
    (tokens,) = jax.export.symbolic_shape("tokens")
    shape = jax.ShapeDtypeStruct((2, tokens, 4), jnp.float32)
    with pytest.raises(ValueError, match="symbolic number of tokens, .*export a function for each length"):
        jax.export.export(jax.jit(FUNCTIONS[name]))(shape, shape, shape)


@pytest.mark.wrong_types
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("wrong", [[[1.0]], None, 1.0], ids=repr)
def test_what_is_no_array_is_an_error(name, wrong):
    x = jnp.ones((1, 1))
    with pytest.raises(TypeError, match=f"k is a {type(wrong).__name__}: expected an array"):
        FUNCTIONS[name](x, wrong, x)
