"""The parts of scripts/on_device.py: what is measured on a GPU or TPU, and small versions of the same for a CPU."""

import json
import math
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from heinsen.errors import HeinsenError, InputError
from heinsen.files import make_folder, write_atomically
from scripts.benchmarking import on_device_report
from scripts.benchmarking.on_device_report import name_of
from scripts.benchmarking.parts import DONE, ROOT, Part, read_kept, run_parts

NAMES = ("accuracy", "step", "step_gated", "attention", "losses", "decode", "step_keep", "step_gated_keep")

_SEQUENCES = 32  # per device in a training step: 32 x 1024 tokens keep a device busy, and fit into 16 GB
_KEEP_BYTES = 50 * 2**30  # of device memory, from which on the same step fits without recomputation
_GATED = ("model.gate=head", "model.output=gate", "model.convolution=4", "model.position=none")  # gated_125m.py's
_SKIP = "--skip=heinsen reference,heinsen chunked (unchecked),heinsen chunked (real values)"


class OnDeviceError(HeinsenError, RuntimeError):
    """The device cannot be used, or not all parts are done: rerun the same command to resume."""


def run(out: Path, minutes: float, names: Sequence[str], small: bool) -> str:
    """Run the parts that are named, () for all; write the report, and return it.

    Raises InputError, and OnDeviceError if not all of them are done: the report is written then, too.
    """
    start = time.monotonic()
    if not 0 < minutes < math.inf:
        raise InputError(f"--minutes={minutes}: expected a number above 0")
    if unknown := set(names) - set(NAMES):
        raise InputError(f"--parts={','.join(sorted(unknown))}: choose among {', '.join(NAMES)}")
    make_folder(out)
    device = find_device(out)
    small = small or device["platform"] == "cpu"
    parts = small_parts() if small else full_parts(device)
    chosen = [part for part in parts if not names or part.name in names]
    if not chosen:
        needed = f"an accelerator with {_KEEP_BYTES >> 30} GiB"
        raise InputError(f"--parts={','.join(names)} needs {needed}, here is {name_of(device)}")
    outcomes = run_parts(chosen, out, start + 60 * minutes)
    known = read_kept(parts, out) | outcomes
    report = on_device_report.write(out, device, small, [part for part in parts if part.name in known], known)
    if missing := [name for name, outcome in outcomes.items() if outcome.state != DONE]:
        raise OnDeviceError(
            f"{len(missing)} of {len(chosen)} parts are not done ({', '.join(missing)}): see {out / 'report.md'}; "
            "rerun the same command to resume"
        )
    return report


def find_device(out: Path) -> dict[str, Any]:
    """Return the device, and record it in OUT/device.json. Raises OnDeviceError if OUT is of another device.

    A process of its own asks, as one that has used an accelerator keeps it from others.
    """
    code = "import json; from scripts.benchmarking.measure import describe_device; print(json.dumps(describe_device()))"
    end = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    if end.returncode:
        said = end.stderr.strip().splitlines() or [f"status {end.returncode}"]
        raise OnDeviceError(f"`import jax; jax.devices()` fails here: {said[-1]}")
    device = json.loads(end.stdout.splitlines()[-1])
    record = out / "device.json"
    if record.exists():
        before = json.loads(record.read_text())
        if (before["device"], before["count"]) != (device["device"], device["count"]):
            raise OnDeviceError(f"{out} holds results of {name_of(before)}, here is {name_of(device)}: change --out")
    write_atomically(record, json.dumps(device) + "\n")
    return device


def full_parts(device: Mapping[str, Any]) -> list[Part]:
    """Return the parts for an accelerator."""
    batch = f"--config.batch_size={_SEQUENCES * device['count']}"
    step = lambda name, *options: ("step", f"--config=configs/{name}.py", batch, "--repeats=5", *options)
    lengths = ("--lengths=256,2048,16384,65536", "--dtypes=bfloat16,float32", _SKIP)
    contexts = ("--contexts=1000,100000", "--batches=1,32,256", "--repeats=5")
    parts = [
        Part("accuracy", "Accuracy", ("accuracy",), 110, can_stop=True),
        Part("step", "Training step of configs/pile_125m.py", step("pile_125m"), 80),
        Part("step_gated", "Training step of configs/gated_125m.py", step("gated_125m"), 80),
        Part("attention", "Attention", ("attention", "--repeats=3", "--time_limit=1", *lengths), 160, can_stop=True),
        Part("losses", "Losses of 200 training steps of configs/demo.py", ("losses",), 60),
        Part("decode", "Decoding by configs/pile_125m.py", ("decode", "--config=configs/pile_125m.py", *contexts), 70),
    ]
    if (device["memory"] or 0) < _KEEP_BYTES:
        return parts
    keep = "--config.model.remat=none"
    return [
        *parts,
        Part("step_keep", "Training step of configs/pile_125m.py without remat", step("pile_125m", keep), 40),
        Part("step_gated_keep", "Training step of configs/gated_125m.py without remat", step("gated_125m", keep), 40),
    ]


def small_parts() -> list[Part]:
    """Return the parts with small sizes: some minutes on two CPU cores."""
    step = lambda *options: ("step", "--config=configs/demo.py", "--repeats=2", *options)
    gated = tuple(f"--config.{option}" for option in _GATED)
    sizes = ("--lengths=256,1024", "--heads=4", "--features=8", "--repeats=2", f"{_SKIP},heinsen scan")
    contexts = ("--contexts=100,1000", "--batches=1,32,256", "--repeats=2", "--call_tokens=8")
    return [
        Part("accuracy", "Accuracy", ("accuracy", "--lengths=100", "--features=8"), 3, can_stop=True),
        Part("step", "Training step of configs/demo.py", step(), 1),
        Part("step_gated", "Training step of configs/demo.py with a gate", step(*gated), 1),
        Part("attention", "Attention", ("attention", *sizes), 2, can_stop=True),
        Part("losses", "Losses of 200 training steps of configs/demo.py", ("losses",), 2),
        Part("decode", "Decoding by configs/demo.py", ("decode", "--config=configs/demo.py", *contexts), 1),
    ]
