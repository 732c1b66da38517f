"""Attention compiled for machines that are not there, at the size of the paper's model.

The fused kernels for TPUs: bytes moved, where the compiler chooses the layouts of the arguments, as it does within a
model. Those for Hopper GPUs: what ptxas says of registers.
"""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding

import heinsen
from heinsen.contrib.hlo_cost.costs import count_costs
from heinsen.plan.targets import find_target
from tests.plan.test_compilers import ROOT, needs_gpu, needs_tpu

pytestmark = pytest.mark.long

BATCH, LENGTH, WIDTH = 32, 1024, 768


def bytes_moved(name, d, extras):
    """(bytes moved by the forward and the backward pass, those of the arrays that each pass must read and write)."""
    target, n_heads = find_target(name), WIDTH // d
    sharding = SingleDeviceSharding(target.devices()[0])
    array = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
    q = k = log_v = dy = array(BATCH, n_heads, LENGTH, d)
    state = log_decay = segment_ids = dstate = None
    if extras:
        state = dstate = jax.eval_shape(lambda: heinsen.init_state((BATCH, n_heads), d, d))
        log_decay, segment_ids = array(BATCH, n_heads, LENGTH), array(BATCH, 1, LENGTH, dtype=jnp.int32)

    def run(arguments):
        q, k, log_v, log_decay, state, segment_ids, dy, dstate = arguments

        def call(q, k, log_v, log_decay, state):
            given = {"log_decay": log_decay, "state": state, "segment_ids": segment_ids}
            return heinsen.log_attention(q, k, log_v, **given, implementation="pallas", return_state=extras)

        y, pull = jax.vjp(call, q, k, log_v, log_decay, state)
        return y, pull((dy, dstate) if extras else dy)

    arguments = q, k, log_v, log_decay, state, segment_ids, dy, dstate
    chosen = Format(Layout.AUTO, sharding)
    formats = jax.tree.map(lambda x: chosen, arguments)
    with target.compiling():
        compiled = jax.jit(run, in_shardings=(formats,), out_shardings=chosen).lower(arguments).compile()
    inputs, gradients = (q, k, log_v, log_decay, state), (dy, dstate)
    forward, backward = (*inputs, segment_ids, *gradients), (*inputs, segment_ids, *gradients, *inputs)
    least = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((forward, backward)))
    return count_costs(compiled.as_text(), target.chip).total.n_bytes, least


@needs_tpu
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "gate, documents, state"])
@pytest.mark.parametrize("d", [16, 32, 64, 128])
@pytest.mark.parametrize("name", ["v5e-4"])
def test_the_passes_move_little_more_than_they_must(name, d, extras):
    moved, least = bytes_moved(name, d, extras)
    # The aim is 1.5 times. Gradients of states are whole arrays [K, V] to XLA, which fills their last axis up to 128
    # lanes. With 128 features XLA copies every array into the kernels' layout and out of it.
    most = 3.2 if d == 128 else 1.7 if extras else 1.5
    assert least < moved < most * least


@needs_tpu
def test_kernels_compile_for_two_cores():
    moved, least = bytes_moved("v5p-8", 32, extras=True)
    assert least < moved < 1.7 * least


@needs_gpu
def test_kernels_compile_for_hopper_and_spill_next_to_nothing():
    command = [sys.executable, "experiments/mosaic_gpu/compile.py", "--features=32,64"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    spills = re.findall(r"(\d+) features, (.*?), (\w+ward): .* (\d+) bytes spilled", run.stdout)
    assert len(spills) == 16, run.stdout
    for features, case, _, spilled in spills:
        # ptxas has 255 registers for a thread: a gated head of 64 features wants some twenty more.
        assert int(spilled) <= (96 if features == "64" and "gate" in case else 0), run.stdout


@needs_tpu
def test_a_gate_in_two_groups_of_chunks_compiles():
    """With the chunks of a group written out, instead of a loop over them, libtpu 0.0.42.1 dies of a failed check."""
    target = find_target("v5p-8")
    sharding = SingleDeviceSharding(target.devices()[0])
    x = jax.ShapeDtypeStruct((120, 24, 1024, 32), "float32", sharding=sharding)
    log_decay = jax.ShapeDtypeStruct(x.shape[:-1], "float32", sharding=sharding)

    def attend(q, k, log_v, log_decay):
        return heinsen.log_attention(q, k, log_v, log_decay=log_decay, implementation="chunked")

    with target.compiling():
        assert jax.jit(attend).lower(x, x, x, log_decay).compile().memory_analysis().temp_size_in_bytes > 0
