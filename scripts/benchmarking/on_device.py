"""The parts of scripts/on_device.py, which run one after another within a total time, and their report."""

import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from heinsen.errors import HeinsenError, InputError
from heinsen.files import make_folder, write_atomically
from heinsen.training.devices import OPTIONS_SWITCH
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
_INTERVAL = 0.5  # seconds between looks at what a part has found
_SEQUENCES = 32  # per device in a training step: 32 x 1024 tokens keep a device busy, and fit into 16 GB
_PLAIN = "_plain_xla"  # ends the names of parts that run without XLA's options

Arguments = tuple[str, ...]  # of scripts/benchmark.py


class OnDeviceError(HeinsenError, RuntimeError):
    """The device cannot be used, or not all parts are done: rerun the same command to resume."""


def full_parts(device: Mapping[str, Any]) -> dict[str, Arguments]:
    """Return the parts for an accelerator by name, the most needed first."""
    batch = f"--config.batch_size={_SEQUENCES * device['count']}"
    step = lambda name, *options: ("step", f"--config=configs/{name}.py", batch, "--repeats=5", *options)
    own, fused = "--only=heinsen", "--config.model.implementation=pallas"
    times = ("attention", "--batch=4", "--dtypes=bfloat16", "--repeats=3", "--time_limit=1")
    has_kernels = device["platform"] == "gpu"
    left_out = ["heinsen reference", "heinsen scan", "heinsen chunked (real values)", "heinsen pallas (real values)"]
    left_out += ["heinsen chunked (forget gate)", "softmax (jax)"] if has_kernels else []  # compiling takes most time
    skip = f"--skip={','.join(left_out)}"
    forms = "--only=heinsen chunked,heinsen pallas,heinsen chunked (forget gate),heinsen pallas (forget gate)"
    contexts = ("--contexts=1000,100000", "--batches=1,32,256", "--repeats=5")
    parts = {
        "accuracy": ("accuracy", "--lengths=1000", "--only=chunked,pallas"),
        "step": step("pile_125m", own),
        "step_fused": step("pile_125m", own, fused),
        "step_gated": step("gated_125m", own),
        "step_gated_fused": step("gated_125m", own, fused),
        "step_gpt2": step("gpt2_124m"),
        "step_fused_float32": step("pile_125m", own, fused, "--config.model.dtype=float32"),
        "step_fused_recompute_all": step("pile_125m", own, fused, "--config.model.remat=full"),
        "step_fused_save_all": step("pile_125m", own, fused, "--config.model.remat=none"),
        f"step_fused{_PLAIN}": step("pile_125m", own, fused),
        "attention": (*times, "--lengths=1024,8192,32768", skip),
        "attention_64": (*times, "--lengths=1024,8192", "--heads=12", "--features=64", skip),
        "step_8192": step("pile_125m", "--lengths=8192"),
        "tails": (*times, "--lengths=1024,8192", "--inputs=normal,tails", forms),
        "decode": ("decode", "--config=configs/pile_125m.py", *contexts),
        "losses": ("losses",),
    }
    return {name: arguments for name, arguments in parts.items() if has_kernels or "fused" not in name}


def small_parts() -> dict[str, Arguments]:
    """Return the parts with small sizes: some minutes on two CPU cores."""
    bytes_ = "--config.model.vocab_size=257"  # there are no data here
    step = lambda name, *options: ("step", f"--config=configs/{name}.py", bytes_, "--repeats=2", *options)
    sizes = ("attention", "--lengths=256,1024", "--heads=4", "--features=8", "--repeats=2")
    contexts = ("--contexts=100,1000", "--batches=1,32,256", "--repeats=2")
    return {
        "accuracy": ("accuracy", "--lengths=100", "--features=8", "--only=chunked,scan"),
        "step": step("demo"),
        "step_gated": step("gated_demo"),
        "step_softmax": step("demo", "--only=softmax"),
        "attention": (*sizes, "--skip=heinsen reference,heinsen scan,heinsen chunked (real values)"),
        "tails": (*sizes, "--inputs=normal,tails", "--only=heinsen chunked"),
        "decode": ("decode", "--config=configs/demo.py", bytes_, *contexts),
        "losses": ("losses",),
    }


def run(out: Path, minutes: float, names: Sequence[str], small: bool) -> str:
    """Run the parts that are named, () for all, and return the report, which is also written after each figure.

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
    chosen = {name: arguments for name, arguments in parts.items() if name in (names or parts)}
    done = {name: tuple(x["arguments"]) for name, x in record["parts"].items() if x["state"] == DONE}
    missing = [name for name, arguments in chosen.items() if done.get(name) != arguments]
    unfinished = []
    for i, name in enumerate(missing, start=1):
        if (rest := end - time.monotonic()) < _LEAST:
            unfinished += missing[i - 1 :]
            break
        tell(f"{name} ({i} of {len(missing)}): {rest:.0f} s are left; see {out / name}/log.txt")
        for found in run_part(parts[name], out / name, rest):
            record["parts"][name] = found
            write_record(out, record)
        tell(f"{name}: {found['state']} after {found['seconds']:.0f} s")
        unfinished += [name] * (found["state"] != DONE)
    report = write_record(out, record)
    if unfinished:
        raise OnDeviceError(
            f"not done: {', '.join(unfinished)}; see {out / 'report.md'}, and rerun the same command to resume"
        )
    return report


def find_device() -> dict[str, Any]:
    """Return the device, as another process sees it: here it stays free. Raises OnDeviceError.

    Its fields are those of `machine`, the platform, and how many devices there are.
    """
    code = (
        "import json, jax; from scripts.benchmarking.measure import machine\n"
        "print(json.dumps(machine() | dict(platform=jax.default_backend(), count=jax.device_count())))"
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


def run_part(arguments: Arguments, folder: Path, limit: float) -> Iterator[dict[str, Any]]:
    """Run a part for so many seconds at most. Yield what it has found: after each figure, and how it ended."""
    make_folder(folder)
    results, log, start = folder / "results.json", folder / "log.txt", time.monotonic()
    results.unlink(missing_ok=True)  # of other flags, or of a process that was stopped

    def found(state: str) -> dict[str, Any]:
        result = json.loads(results.read_text()) if results.exists() else None
        last = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        seconds = time.monotonic() - start
        return dict(arguments=list(arguments), state=state, seconds=seconds, last_lines=last, result=result)

    command = [sys.executable, PROGRAM, *arguments, f"--out={folder.absolute()}"]
    # All parts share a cache of compiled programs.
    cache = {"JAX_COMPILATION_CACHE_DIR": str((folder.parent / "compiled").absolute())}
    environment = {**os.environ, **cache, **variables_of(folder.name)}
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)
        try:
            written = 0
            while process.poll() is None and time.monotonic() < start + limit:
                time.sleep(_INTERVAL)
                if results.exists() and (latest := results.stat().st_mtime_ns) != written:
                    written = latest
                    yield found(STOPPED)
            is_stopped = process.poll() is None
        finally:
            process.kill()
            process.wait()
    state = STOPPED if is_stopped else DONE if process.returncode == 0 and results.exists() else FAILED
    yield found(state)


def variables_of(name: str) -> dict[str, str]:
    """Return the variables of the environment of a part."""
    return {OPTIONS_SWITCH: "0"} if name.endswith(_PLAIN) else {}


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
        variables = "".join(f"{variable}={value} " for variable, value in variables_of(name).items())
        lines += ["", f"## {name}", "", f"`{variables}python {PROGRAM} {shlex.join(part['arguments'])}`"]
        if part["state"] != DONE:
            lines += ["", f"**{part['state']}** after {part['seconds']:.0f} s; the end of `{name}/log.txt`:"]
            lines += ["", "```text", *part["last_lines"], "```"]
        if part["result"] is not None:
            lines += ["", "```text", *REPORTS[part["arguments"][0]](part["result"]), "```"]
    report = "\n".join(lines) + "\n"
    write_atomically(out / "results.json", json.dumps(record, indent=1) + "\n")
    write_atomically(out / "report.md", report)
    return report
