"""Attention, position recurrence and convolution on four simulated devices against one, in float64, with gradients."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

COMMON = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from heinsen import LogState, logspace
from heinsen.models.convolution import convolve
from heinsen.ops import sharded
from heinsen.ops.api import log_attention
from heinsen.parallel import AXES, MeshConfig, MeshError, make_mesh, on_each_device, scan_before

rng = np.random.default_rng(int(sys.argv[1]))
draw = lambda *shape: jnp.asarray(rng.normal(size=shape))
B, H, T, K, V, D = 4, 4, 24, 3, 5, 6


def same(actual, wanted, what):
    assert len(jax.tree.leaves(actual)) == len(jax.tree.leaves(wanted)) > 0
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted)):
        assert x.dtype == jnp.float64
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-11, err_msg=what)


def value_and_gradients(function, arguments, weights):
    def weighted(*arguments):
        out = function(*arguments)
        return sum(jnp.vdot(w, x) for w, x in zip(weights, jax.tree.leaves(out))), out

    (_, out), grads = jax.jit(jax.value_and_grad(weighted, argnums=range(len(arguments)), has_aux=True))(*arguments)
    return out, grads


mesh = make_mesh(MeshConfig(1, 1, 1, 4))
q, k, log_v = draw(B, H, T, K), 4 * draw(B, H, T, K), draw(B, H, T, V)
# In one head the state before has small weights and large values, so that decays move the largest mean of both.
large = jnp.zeros((B, H)).at[1, 0].set(10)
before = LogState(draw(B, H, K, V) + 2 * large[..., None, None], draw(B, H, K) - large[..., None])
weights = draw(B, H, T, V), draw(B, H, K, V), draw(B, H, K)
# Documents that end within a device's tokens, at their end, in a device's first token; and one over three devices.
documents = np.zeros((4, 1, T), int)
documents[0, 0, [2, 6, 12]] = documents[1, 0, [7, 11]] = documents[2, 0, 3] = documents[2, 0, 23] = 1
documents[3, 0, rng.choice(np.arange(1, T), 5)] = 1
# (tests/test_parallel.py has sequences without documents.)
segments = jnp.asarray(np.cumsum(documents, axis=-1))
options = dict(segment_ids=segments, return_state=True, implementation="reference")  # of one device
"""

ATTENTION = """
one = lambda q, k, v, s: log_attention(q, k, v, state=s, **options)
wanted = value_and_gradients(one, (q, k, log_v, before), weights)
many = lambda q, k, v, s: sharded.log_attention_on_mesh(mesh, q, k, v, s, segments, None)
same(value_and_gradients(many, (q, k, log_v, before), weights), wanted, "attention")
"""

ATTENTION_WITH_DECAYS = """
decays = -jnp.exp(draw(B, H, T)).at[0, 1, jnp.array([3, 6, 12])].set(jnp.inf)
one = lambda q, k, v, g, s: log_attention(q, k, v, log_decay=g, state=s, **options)
wanted = value_and_gradients(one, (q, k, log_v, decays, before), weights)
many = lambda q, k, v, g, s: sharded.log_attention_on_mesh(mesh, q, k, v, s, segments, None, log_decay=g)
same(value_and_gradients(many, (q, k, log_v, decays, before), weights), wanted, "attention with decays")
"""

RECURRENCE_AND_CONVOLUTION = """
log_a, log_b, initial = logspace.log_sigmoid(3 * draw(B, T, D)), 5 * draw(B, T, D), draw(B, D)
log_a = log_a.at[:, [0, 5, 12], 1].set(-jnp.inf)  # forgets all before
one = lambda a, b, e: logspace.log_linear_recurrence(a, b, 1, e)
weights = [draw(B, T, D)]
wanted = value_and_gradients(one, (log_a, log_b, initial), weights)
many = lambda a, b, e: sharded.log_linear_recurrence(mesh, a, b, e)
same(value_and_gradients(many, (log_a, log_b, initial), weights), wanted, "recurrence")

x, taps, last = draw(B, H, T, V), draw(H, 4, V), draw(B, H, 3, V)
slots = np.arange(T) + 2  # documents begin in the inputs before the first token, and within the tokens
places = jnp.asarray(slots - np.maximum.accumulate(np.where(documents[:, 0] == 1, slots, 0), axis=-1))
weights = draw(B, H, T, V), draw(B, H, 3, V)
wanted = value_and_gradients(lambda *inputs: convolve(None, *inputs, places, None), (x, taps, last), weights)
for mesh in (make_mesh(MeshConfig(1, 1, 1, 4)), make_mesh(MeshConfig(1, 1, 2, 2))):
    many = lambda *inputs: convolve(mesh, *inputs, places, None)
    same(value_and_gradients(many, (x, taps, last), weights), wanted, "convolution")

# By batch and heads alone, with one array of heads and one of sequences in the context.
by_heads = lambda q, k, v, s, context: (q * context[0][..., None] + context[1][:, None, :, None] * (k + s), s + k)
arguments = q, k, log_v, k + 1, (draw(B, H, T), draw(B, T))
for mesh in (make_mesh(MeshConfig(2, 1, 2, 1)), make_mesh(MeshConfig(1, 2, 1, 1), jax.devices()[:2])):
    same(jax.jit(sharded.over_heads(mesh, by_heads))(*arguments), by_heads(*arguments), "heads")
try:
    sharded.over_heads(make_mesh(MeshConfig(1, 1, 2, 2)), by_heads)
    raise AssertionError("no sequence can be divided")
except MeshError as error:
    assert "mesh.sequence = 2 divides the tokens" in str(error)

# Matrices: their product is associative and not commutative.
for n in (1, 2, 3, 4):
    mesh = Mesh(np.array(jax.devices()[:n]).reshape(1, 1, 1, n), AXES)
    x, first = rng.normal(size=(n, 2, 2)), np.eye(2)
    run = on_each_device(mesh, lambda x: scan_before(lambda a, b: b @ a, x[0], jnp.eye(2), "sequence")[None],
                         in_specs=P("sequence"), out_specs=P("sequence"))
    expected = [first]
    for i in range(n - 1):
        expected.append(x[i] @ expected[-1])
    np.testing.assert_allclose(run(jnp.asarray(x)), np.stack(expected), rtol=1e-12)
"""


@pytest.mark.parametrize(
    "code",
    [
        # With decays, devices hand on the same parts of the state.
        pytest.param(ATTENTION, id="attention", marks=pytest.mark.long),
        pytest.param(ATTENTION_WITH_DECAYS + RECURRENCE_AND_CONVOLUTION, id="with decays, recurrence, convolution"),
    ],
)
def test_a_mesh_gives_outputs_states_and_gradients_of_one_device(request, code):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4", "JAX_ENABLE_X64": "1"}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    command = [sys.executable, "-W", "error", "-c", COMMON + code, str(request.config.option.seed)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"--seed={request.config.option.seed}: {done.stderr}"
