"""Compile the fused kernels for an H200 on a machine without a GPU, and print what ptxas says of them.

    pip install jax-cuda13-plugin==$(python -c 'import jax; print(jax.__version__)') nvidia-cuda-nvcc
    python experiments/mosaic_gpu/compile.py --features=16,32,64

Each case is the gradient of attention over 32 sequences of 24 heads and 1024 tokens: one forward and one backward
kernel. Printed for each: registers of a thread and bytes that it spills to memory.
"""

import os
import re
import tempfile
from pathlib import Path

from absl import app, flags

from heinsen.errors import exit_on_error
from scripts.cli import parse_counts, parse_flags, show_help

FEATURES = flags.DEFINE_list("features", ["16", "32", "64"], "Features of keys and of values.")

show_help(__name__)

import jax
import jax.numpy as jnp

import heinsen
from heinsen.plan.targets import find_target


def main(argv: list[str]) -> None:
    with exit_on_error(), tempfile.TemporaryDirectory() as reports:
        os.environ |= {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_TO": reports}
        compile_all(parse_counts("features", FEATURES.value), Path(reports))


def compile_all(sizes: list[int], reports: Path) -> None:
    """Compile every case for heads of each size, and print what arrives in `reports`."""
    cases = {
        "log values": (heinsen.log_attention, False),
        "log values with a gate": (heinsen.log_attention, True),
        "real values": (heinsen.attention, False),
        "real values with a gate": (heinsen.attention, True),
    }
    target = find_target("h200")
    sharding = jax.sharding.SingleDeviceSharding(target.devices()[0])
    array = lambda *shape: jax.ShapeDtypeStruct((32, 24, 1024, *shape), jnp.float32, sharding=sharding)
    for d in sizes:
        for name, (function, gate) in cases.items():

            def loss(q, k, v, log_decay, function=function, gate=gate):
                decay = {"log_decay": log_decay} if gate else {}
                return jnp.sum(function(q, k, v, **decay, implementation="pallas") ** 2)

            with target.compiling():
                jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(array(d), array(d), array(d), array()).compile()
            for report in sorted(reports.glob("*.ptxas")):
                print(f"{d} features, {name}, {describe(report)}", flush=True)
            for file in reports.iterdir():
                file.unlink()


def describe(report: Path) -> str:
    """What ptxas says of one kernel."""
    text = report.read_text()
    find = lambda pattern: int(re.search(pattern, text)[1])
    kernel = re.search(r"entry function '(\w+?)_kernel", text)[1]
    registers, spilled = find(r"Used (\d+) registers"), find(r"(\d+) bytes spill stores")
    return f"{kernel}: {registers} registers, {spilled} bytes spilled"


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
