"""Attention compiled for machines that are not there, at the size of the paper's model.

The fused kernels for Hopper GPUs: what ptxas says of registers. The chunked form for TPUs: that it compiles.
"""

import re

import jax
import pytest
from jax.sharding import SingleDeviceSharding

import heinsen
from heinsen.plan.targets import find_target
from tests.plan.test_compilers import needs_gpu, needs_tpu

pytestmark = pytest.mark.long


@needs_gpu
@pytest.mark.parametrize("gated", [False, True], ids=["", "gate"])
@pytest.mark.parametrize("function", [heinsen.log_attention, heinsen.attention], ids=["log", "real"])
@pytest.mark.parametrize("features", [32, 64])
def test_kernels_compile_for_hopper_and_spill_next_to_nothing(features, function, gated, tmp_path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    target = find_target("h200")
    sharding = SingleDeviceSharding(target.devices()[0])
    x = jax.ShapeDtypeStruct((32, 24, 1024, features), "float32", sharding=sharding)
    decay = jax.ShapeDtypeStruct(x.shape[:-1], "float32", sharding=sharding)

    def loss(q, k, v, log_decay):
        options = {"log_decay": log_decay} if gated else {}
        return jax.numpy.sum(function(q, k, v, **options, implementation="pallas") ** 2)

    with target.compiling():
        jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(x, x, x, decay).compile()
    said = [file.read_text() for file in tmp_path.glob("*.ptxas")]
    assert len(said) == 2, "a kernel forward and one backward"
    for text in said:
        # ptxas has 255 registers for a thread: a gated head of 64 features wants some twenty more.
        assert int(re.search(r"(\d+) bytes spill stores", text)[1]) <= (96 if features == 64 and gated else 0), text


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
