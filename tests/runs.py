"""Small runs of the entry points, shared by the tests of training, evaluation and generation.

The runs use configs/default.py with small sizes: 60 steps of 4 x 16 tokens, two epochs of the data, a checkpoint every
10 steps and a validation every 6. The fixtures are in run_fixtures.py.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from configs import default
from heinsen.config import from_mapping
from heinsen.files import seal
from heinsen.parallel import make_mesh
from heinsen.training import metrics
from heinsen.training.checkpoint import Checkpoints
from heinsen.training.config import TrainConfig
from heinsen.training.optimizer import make_optimizer
from heinsen.training.step import abstract_train_state

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 300  # seconds for a command on a busy machine
STEPS, BATCH, LENGTH = 60, 4, 16
CHECKPOINT_EVERY, VALIDATE_EVERY, KEEP = 10, 6, 3
EOT = 256

OVERRIDES: dict[str, Any] = {
    "total_tokens": STEPS * BATCH * LENGTH,
    "sequence_length": LENGTH,
    "batch_size": BATCH,
    "model.vocab_size": 257,
    "model.padded_vocab_size": 264,
    "model.n_layers": 2,
    "model.d_model": 32,
    "model.n_heads": 2,
    "model.d_key": 4,
    "model.d_value": 4,
    "model.implementation": "reference",  # the fastest to trace
    "optimizer.learning_rate": 4e-3,
    "optimizer.final_learning_rate": 4e-4,
    "optimizer.warmup_steps": 8,
    "log_every": 1,
    "validate_every": VALIDATE_EVERY,
    "validation_tokens": 300,
    "checkpoint_every": CHECKPOINT_EVERY,
    "keep_checkpoints": KEEP,
}


# ---- data and configs ------------------------------------------------------------------------


def write_split(
    folder: Path,
    *shards: Sequence[int] | np.ndarray,
    sources: Sequence[Sequence[str | None] | None] = (),
    n_lost: int = 0,
    **changes: Any,
) -> None:
    """Write a split of byte tokens, following the contract of heinsen/data/dataset.py.

    sources: the names of each shard's documents, in order, for the first shards; None for a shard without.
    n_lost: bytes of the last shard that its tokens do not stand for.
    changes: fields of metadata.json. For other totals the last shard makes up.
    """
    folder.mkdir(parents=True)
    metadata = {"format_version": 1, "tokenizer": "bytes", "vocab_size": 257, "eot_id": EOT, "dtype": "uint16"}
    metadata |= {"num_skipped_documents": 0, "source": {}, "shards": []} | changes
    for index, (tokens, names) in enumerate(itertools.zip_longest(shards, sources)):
        n_documents = int(np.sum(np.asarray(tokens) == metadata["eot_id"]))
        totals = {"num_tokens": len(tokens), "num_documents": n_documents, "num_bytes": len(tokens) - n_documents}
        shard = write_array(folder / f"shard-{index:05d}.npy", tokens) | totals
        if names is not None:
            found = list(dict.fromkeys(names))
            file = write_array(folder / f"shard-{index:05d}.sources.npy", list(map(found.index, names)))
            shard["sources"] = file | {"names": found}
        metadata["shards"].append(shard)
    if n_lost:
        metadata["shards"][-1]["num_lost_bytes"] = n_lost
    for name in totals:
        total = sum(shard[name] for shard in metadata["shards"])
        metadata["shards"][-1][name] += metadata.setdefault(name, total) - total
    (folder / "metadata.json").write_text(json.dumps(seal(metadata)))


def write_array(path: Path, numbers: Sequence[int] | np.ndarray) -> dict[str, Any]:
    """Write a file of uint16; return its record."""
    np.save(path, np.asarray(numbers, np.uint16))
    return {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def draw_text(rng: np.random.Generator, n_tokens: int) -> np.ndarray:
    """Draw letters of unequal frequencies, in documents that each end with an end-of-text token."""
    tokens = rng.choice(np.arange(97, 123), n_tokens, p=np.arange(1, 27) / 351)
    tokens[rng.random(n_tokens) < 0.02] = EOT
    tokens[-1] = EOT
    return tokens


def run_config(data: Path, /, **changes: Any) -> TrainConfig:
    """Return the small run's config with `changes`, such as `model__n_layers=3`. Raises ConfigError."""
    config = default.get_config()
    config.data.path = str(data)
    config.update_from_flattened_dict(OVERRIDES)
    mapping = config.to_dict()
    for name, value in changes.items():
        *groups, field = name.split("__")
        group = mapping
        for key in groups:
            group = group[key]
        group[field] = value  # bypasses the ConfigDict, which checks some types itself
    return from_mapping(TrainConfig, mapping)


# ---- commands --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Commands:
    """Run the entry points in separate processes that share one cache of compiled functions.

    XLA's optimizations are off: most commands run so few steps that compiling would take most of the time.
    """

    cache: Path

    def environment(self, devices: int) -> Mapping[str, str]:
        return {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
            "JAX_COMPILATION_CACHE_DIR": str(self.cache),
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "PYTHONUNBUFFERED": "1",
        }

    def start(self, *arguments: str | Path, devices: int = 1) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            cwd=ROOT,
            env=self.environment(devices),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def start_into(self, folder: Path, *arguments: str | Path, devices: int = 1) -> subprocess.Popen:
        """Start a command that writes the files stdout, stderr and, when it ends, status to `folder`."""
        script = '"$@" > "$0/stdout" 2> "$0/stderr"; echo $? > "$0/ended"; mv "$0/ended" "$0/status"'
        command = ["sh", "-c", script, folder, sys.executable, *arguments]
        return subprocess.Popen(
            list(map(str, command)), cwd=ROOT, env=self.environment(devices), stdin=subprocess.DEVNULL
        )

    def run(self, *arguments: str | Path, devices: int = 1, stdin: str = "") -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=ROOT,
            env=self.environment(devices),
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            timeout=TIMEOUT,
        )

    def fork(self, *arguments: str | Path, devices: int = 1, stdin: str = "") -> subprocess.CompletedProcess:
        """Run a script as `run` does, but in a fork of a process that has imported JAX and heinsen (warm.py).

        Every script also has a test that runs it in a new process: an import that is missing shows there alone.
        """
        words = list(map(str, arguments))
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "stdin").write_text(stdin, encoding="utf-8")
            request = {"arguments": words, "devices": devices, "folder": folder}
            self._warm.stdin.write(json.dumps(request).encode() + b"\n")
            ready, _, _ = select.select([self._warm.stdout], [], [], TIMEOUT)
            assert ready, f"{words} takes too long"
            status = int(self._warm.stdout.readline())
            stdout, stderr = (Path(folder, name).read_text(encoding="utf-8") for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(words, status, stdout, stderr)

    @functools.cached_property
    def _warm(self) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.warm"],
            bufsize=0,
            cwd=ROOT,
            env=self.environment(1),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def close(self) -> None:
        if "_warm" in self.__dict__:
            with self._warm as process:
                process.kill()


def train_command(data: Path, workdir: Path, /, **changes: Any) -> list[str]:
    """Return the small run's command; `changes` as in `run_config`."""
    fields = {**OVERRIDES, "data.path": data} | {name.replace("__", "."): value for name, value in changes.items()}
    overrides = [f"--config.{name}={value}" for name, value in fields.items()]
    return ["train.py", "--config=configs/default.py", f"--workdir={workdir}", *overrides]


def finish(process: subprocess.Popen) -> subprocess.CompletedProcess:
    """Wait for a started command and return its result."""
    stdout, stderr = process.communicate(timeout=TIMEOUT)
    return subprocess.CompletedProcess(process.args, process.returncode, (stdout or b"").decode(), stderr.decode())


def stop_when(process: subprocess.Popen, moment: Callable[[], bool], number: int) -> subprocess.CompletedProcess:
    """Send signal `number` at a moment when `moment()` holds, and wait for the process to end."""
    send_when(process, moment, number)
    return finish(process)


def send_when(process: subprocess.Popen, moment: Callable[[], bool], number: int) -> None:
    """Send signal `number` at a moment when `moment()` holds."""
    deadline = time.monotonic() + TIMEOUT
    while True:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"the run ended before the moment to stop it: {finish(process).stderr}")
        if moment():
            process.send_signal(signal.SIGSTOP)  # pause it, to check whether the moment has already passed
            time.sleep(0.02)
            if moment():
                process.send_signal(number)
                if number != signal.SIGSTOP:
                    process.send_signal(signal.SIGCONT)
                return
            process.send_signal(signal.SIGCONT)
        time.sleep(0.002)


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, action: Callable[[], Any]) -> None:
    """Call `action` when a run in this process writes that step's metrics."""
    write = metrics.MetricsLog.write

    def write_and_act(self, written_step, values):
        write(self, written_step, values)
        if written_step == step and "loss" in values:
            action()

    monkeypatch.setattr(metrics.MetricsLog, "write", write_and_act)


# ---- contents of run folders -----------------------------------------------------------------


def read_log(workdir: Path) -> list[dict[str, Any]]:
    """Read the complete lines of metrics.jsonl without heinsen (none if the file does not exist yet)."""
    path = workdir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def without_timing(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the part of a log that must repeat bit for bit; JSON stores floats exactly."""
    return [
        {name: x for name, x in entry.items() if name not in ("tokens_per_second", "mfu", "data_wait")} for entry in log
    ]


def checkpoint_steps(workdir: Path) -> list[int]:
    """Return the steps of the complete checkpoints; a save in progress has a longer name."""
    folder = workdir / "checkpoints"
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit()) if folder.exists() else []


def newest_checkpoint(workdir: Path, config: TrainConfig) -> tuple[int, list[np.ndarray], dict[str, Any]]:
    """Return its step, all arrays of parameters and optimizer state, and its progress. A damaged one fails the test."""
    optimizer = make_optimizer(config.optimizer, config.total_steps)
    abstract = abstract_train_state(config.model, optimizer, make_mesh())
    with Checkpoints(workdir, config.keep_checkpoints, warn=pytest.fail) as checkpoints:
        restored = checkpoints.restore_newest(abstract, config.fingerprint)
    return restored.step, [np.asarray(leaf) for leaf in jax.tree.leaves(restored.state)], restored.progress


def snapshot(folder: Path) -> dict[str, str]:
    """Return {relative path: digest} of the files in a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def copy_run(run: Path, workdir: Path, keep: Callable[[int], bool] = lambda step: True) -> Path:
    """Copy a run with those of its checkpoints whose step passes `keep`."""
    shutil.copytree(run, workdir)
    for step in checkpoint_steps(workdir):
        if not keep(step):
            shutil.rmtree(workdir / "checkpoints" / str(step))
    return workdir


@dataclasses.dataclass(frozen=True)
class Run:
    """Uninterrupted run. Tests read it, or work on a copy."""

    workdir: Path
    data: Path
    stdout: str
    stderr: str

    @property
    def log(self) -> list[dict[str, Any]]:
        return read_log(self.workdir)
