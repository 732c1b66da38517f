"""Compile the fused kernels for an H200 on a machine without a GPU, and print what ptxas says of them.

    pip install jax-cuda13-plugin==$(python -c 'import jax; print(jax.__version__)') nvidia-cuda-nvcc
    PYTHONPATH=. python experiments/mosaic_gpu/compile.py --heads=16,32,64

Each case is the gradient of attention over 32 sequences of 24 heads and 1024 tokens: one forward and one backward
kernel. Printed for each: registers of a thread and bytes that it spills to memory.
"""

import os
import re
import sys
import tempfile
from pathlib import Path

DUMP = Path(tempfile.mkdtemp())
os.environ |= {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_TO": str(DUMP)}

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from absl import app, flags  # noqa: E402
from jax.experimental import topologies  # noqa: E402

import heinsen  # noqa: E402
from heinsen import platform  # noqa: E402

HEADS = flags.DEFINE_list("heads", ["16", "32", "64"], "features of keys and of values")

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 cuda_compute_capability { major: 9 minor: 0 }
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 151397597184
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 patch: 0 } device_description_str: "NVIDIA H200"
"""
CASES = {
    "log values": (heinsen.log_attention, False),
    "log values with a gate": (heinsen.log_attention, True),
    "real values": (heinsen.attention, False),
    "real values with a gate": (heinsen.attention, True),
}


def main(argv: list[str]) -> None:
    if argv[1:]:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    device = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1").devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    array = lambda *shape: jax.ShapeDtypeStruct((32, 24, 1024, *shape), jnp.float32, sharding=sharding)
    for d in map(int, HEADS.value):
        for name, (function, gate) in CASES.items():

            def loss(q, k, v, log_decay, function=function, gate=gate):
                decay = {"log_decay": log_decay} if gate else {}
                return jnp.sum(function(q, k, v, **decay, implementation="pallas") ** 2)

            with platform.compiling_for("gpu"):
                jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(array(d), array(d), array(d), array()).compile()
            for report in sorted(DUMP.glob("*.ptxas")):
                print(f"{d} features, {name}, {describe(report)}", flush=True)
            for file in DUMP.iterdir():
                file.unlink()


def describe(report: Path) -> str:
    """What ptxas says of one kernel."""
    text = report.read_text()
    find = lambda pattern: int(re.search(pattern, text)[1])
    kernel = re.search(r"entry function '(\w+?)_kernel", text)[1]
    registers, spilled = find(r"Used (\d+) registers"), find(r"(\d+) bytes spill stores")
    return f"{kernel}: {registers} registers, {spilled} bytes spilled"


if __name__ == "__main__":
    sys.exit(app.run(main))
