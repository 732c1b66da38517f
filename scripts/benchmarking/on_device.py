"""The parts of scripts/on_device.py, which run one after another within a total time, and their report."""

import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from heinsen.errors import HeinsenError, InputError
from heinsen.files import make_folder, write_atomically
from scripts.benchmarking import accuracy, attention, decode, losses, step
from scripts.benchmarking.measure import describe_machine, tell

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAM = "scripts/benchmark.py"
REPORTS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "accuracy": accuracy.report,
    "attention": attention.report,
    "decode": decode.report,
    "losses": losses.report,
    "step": step.report,
}

DONE, FAILED, STOPPED = "done", "failed", "stopped: no time left"
_LAST_LINES = 12  # of a part that is not done, in the report
_LEAST = 10.0  # seconds, with less of which no part is begun
_SEQUENCES = 32  # per device in a training step: 32 x 1024 tokens keep a device busy, and fit into 16 GB
_KEEP_BYTES = 50 * 2**30  # of device memory, from which on the same step fits without recomputation
_SKIP = "--skip=heinsen reference,heinsen chunked (real values)"


Arguments = tuple[str, ...]  # of scripts/benchmark.py


class OnDeviceError(HeinsenError, RuntimeError):
    """The device cannot be used, or not all parts are done: rerun the same command to resume."""


def full_parts(device: Mapping[str, Any]) -> dict[str, Arguments]:
    """Return the parts for an accelerator, by name."""
    batch = f"--config.batch_size={_SEQUENCES * device['count']}"
    step = lambda name, *options: ("step", f"--config=configs/{name}.py", batch, "--repeats=5", *options)
    lengths = ("--lengths=256,2048,16384,65536", "--dtypes=bfloat16,float32", "--repeats=3", "--time_limit=1", _SKIP)
    contexts = ("--contexts=1000,100000", "--batches=1,32,256", "--repeats=5")
    parts = {
        "accuracy": ("accuracy",),
        "step": step("pile_125m"),
        "step_gated": step("gated_125m"),
        "attention": ("attention", *lengths),
        "losses": ("losses",),
        "decode": ("decode", "--config=configs/pile_125m.py", *contexts),
    }
    if (device["memory"] or 0) < _KEEP_BYTES:
        return parts
    keep = "--config.model.remat=none"
    return {
        **parts,
        "step_keep": step("pile_125m", keep),
        "step_gated_keep": step("gated_125m", keep),
    }


def small_parts() -> dict[str, Arguments]:
    """Return the parts with small sizes: some minutes on two CPU cores."""
    bytes_ = "--config.model.vocab_size=257"  # there are no data here
    step = lambda name: ("step", f"--config=configs/{name}.py", bytes_, "--repeats=2")
    sizes = ("--lengths=256,1024", "--heads=4", "--features=8", "--repeats=2", f"{_SKIP},heinsen scan")
    contexts = ("--contexts=100,1000", "--batches=1,32,256", "--repeats=2")
    return {
        "accuracy": ("accuracy", "--lengths=100", "--features=8"),
        "step": step("demo"),
        "step_gated": step("gated_demo"),
        "attention": ("attention", *sizes),
        "losses": ("losses",),
        "decode": ("decode", "--config=configs/demo.py", bytes_, *contexts),
    }


def run(out: Path, minutes: float, names: Sequence[str], small: bool) -> str:
    """Run the parts that are named, () for all, and return the report, which is also written after each part.

    Raises InputError, and OnDeviceError if not all of them are done.
    """
    end = time.monotonic() + 60 * minutes
    if not 0 < minutes < math.inf:
        raise InputError(f"--minutes={minutes}: expected a number above 0")
    make_folder(out)
    device = find_device()
    record = read_record(out, device)
    small = record["small"] = small or device["platform"] == "cpu"
    parts = small_parts() if small else full_parts(device)
    if unknown := set(names) - parts.keys():
        raise InputError(f"--parts={','.join(sorted(unknown))}: here there are {', '.join(parts)}")

    def find_missing() -> list[str]:
        chosen = {name: list(parts[name]) for name in parts if name in (names or parts)}
        done = {name: x["arguments"] for name, x in record["parts"].items() if x["state"] == DONE}
        return [name for name, arguments in chosen.items() if done.get(name) != arguments]

    missing = find_missing()
    for i, name in enumerate(missing, start=1):
        rest = end - time.monotonic()
        if rest < _LEAST:
            break
        tell(f"{name} ({i} of {len(missing)}): {rest:.0f} s are left; see {out / name}/log.txt")
        record["parts"][name] = found = run_part(parts[name], out / name, rest)
        tell(f"{name}: {found['state']} after {found['seconds']:.0f} s")
        write_record(out, record)
    report = write_record(out, record)
    if missing := find_missing():
        raise OnDeviceError(
            f"not done: {', '.join(missing)}; see {out / 'report.md'}, and rerun the same command to resume"
        )
    return report


def find_device() -> dict[str, Any]:
    """Return the device, as another process sees it: here it stays free. Raises OnDeviceError.

    Its fields are those of `machine`, the platform, how many devices there are, and the bytes that one of them has.
    """
    code = (
        "import json, jax; from scripts.benchmarking.measure import machine\n"
        "memory = (jax.devices()[0].memory_stats() or {}).get('bytes_limit')\n"  # None: it does not say
        "found = dict(platform=jax.default_backend(), count=jax.device_count(), memory=memory)\n"
        "print(json.dumps(machine() | found))"
    )
    end = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    if end.returncode:
        said = end.stderr.strip().splitlines() or [f"status {end.returncode}"]
        raise OnDeviceError(f"`import jax; jax.devices()` fails here: {said[-1]}")
    return json.loads(end.stdout.splitlines()[-1])


def read_record(out: Path, device: Mapping[str, Any]) -> dict[str, Any]:
    """Return what OUT/results.json has. Raises OnDeviceError if it is of another device."""
    path = out / "results.json"
    record = json.loads(path.read_text()) if path.exists() else dict(device=device, parts={})
    if name_of(record["device"]) != name_of(device):
        raise OnDeviceError(
            f"{out} has results of {name_of(record['device'])}, here is {name_of(device)}: change --out"
        )
    return record | {"device": device}


def run_part(arguments: Arguments, folder: Path, limit: float) -> dict[str, Any]:
    """Run a part for so many seconds at most, and return how it ended, with its results: of a stopped one, so far."""
    make_folder(folder)
    results, log, start = folder / "results.json", folder / "log.txt", time.monotonic()
    results.unlink(missing_ok=True)  # of other flags, or of a process that was stopped
    command = [sys.executable, PROGRAM, *arguments, f"--out={folder.absolute()}"]
    # All parts share a cache of compiled programs.
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str((folder.parent / "compiled").absolute())}
    state = FAILED
    with log.open("w") as file:
        try:
            end = subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=file, timeout=limit)
            state = DONE if end.returncode == 0 and results.exists() else FAILED
        except subprocess.TimeoutExpired:
            state = STOPPED
    result = json.loads(results.read_text()) if results.exists() else None
    last = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
    seconds = time.monotonic() - start
    return dict(arguments=list(arguments), state=state, seconds=seconds, last_lines=last, result=result)


# ---- the report ----------------------------------------------------------------------------------


def name_of(device: Mapping[str, Any]) -> str:
    return f"{device['count']} x {device['device']}" if device["count"] > 1 else device["device"]


def write_record(out: Path, record: dict[str, Any]) -> str:
    """Write OUT/results.json and OUT/report.md, and return the report."""
    device = record["device"]
    lines = [f"# {name_of(device)}", "", f"{describe_machine(device)}; written by `python scripts/on_device.py`."]
    if record["small"]:
        lines += ["", "Sizes are small: a rehearsal, whose figures say nothing about an accelerator."]
    lines += ["", "| part | state | seconds |", "|---|---|---|"]
    for name, part in record["parts"].items():
        lines.append(f"| [{name}](#{name}) | {part['state']} | {part['seconds']:.0f} |")
    for name, part in record["parts"].items():
        lines += ["", f"## {name}", "", f"`python {PROGRAM} {shlex.join(part['arguments'])}`"]
        if part["state"] != DONE:
            lines += ["", f"**{part['state']}** after {part['seconds']:.0f} s; the end of `{name}/log.txt`:"]
            lines += ["", "```text", *part["last_lines"], "```"]
        if part["result"] is not None:
            lines += ["", "```text", *REPORTS[part["arguments"][0]](part["result"]), "```"]
    report = "\n".join(lines) + "\n"
    write_atomically(out / "results.json", json.dumps(record, indent=1) + "\n")
    write_atomically(out / "report.md", report)
    return report
