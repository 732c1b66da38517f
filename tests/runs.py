"""Small runs of the entry points, shared by the tests of training, evaluation and generation.

`pytest_plugins = ["tests.runs"]` in a test module brings the fixtures. The runs are configs/demo.py, made smaller: 60
steps of 4 x 16 tokens, two epochs of the data, a checkpoint every 10 steps and a validation every 6.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from configs import demo
from heinsen.config import from_mapping
from heinsen.training.loop import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 300  # seconds for a command on a busy machine
STEPS, BATCH, LENGTH = 60, 4, 16
CHECKPOINT_EVERY, VALIDATE_EVERY, KEEP = 10, 6, 3
EOT = 256

OVERRIDES: dict[str, Any] = {
    "total_tokens": STEPS * BATCH * LENGTH,
    "sequence_length": LENGTH,
    "batch_size": BATCH,
    "model.n_layers": 2,
    "model.d_model": 32,
    "model.n_heads": 2,
    "model.d_key": 4,
    "model.d_value": 4,
    "optimizer.warmup_steps": 8,
    "log_every": 1,
    "validate_every": VALIDATE_EVERY,
    "validation_tokens": 300,
    "checkpoint_every": CHECKPOINT_EVERY,
    "keep_checkpoints": KEEP,
    "peak_flops": 1e12,
}


# ---- data and configs ------------------------------------------------------------------------


def write_split(folder: Path, tokens: np.ndarray, **changes: Any) -> None:
    """A split of byte tokens in one shard, by the contract of heinsen/data/dataset.py."""
    folder.mkdir(parents=True)
    path = folder / "shard-00000.npy"
    np.save(path, np.asarray(tokens, np.uint16))
    n_documents = int(np.sum(tokens == EOT))
    totals = {"num_tokens": len(tokens), "num_documents": n_documents, "num_bytes": len(tokens) - n_documents}
    shard = {"file": path.name, **totals, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    metadata = {
        "format_version": 1,
        "tokenizer": "bytes",
        "vocab_size": 257,
        "eot_id": EOT,
        "dtype": "uint16",
        **totals,
        "shards": [shard],
        "source": {},
        **changes,
    }
    (folder / "metadata.json").write_text(json.dumps(metadata))


def draw_text(rng: np.random.Generator, n_tokens: int) -> np.ndarray:
    """Letters, some likelier than others, in documents that each end with an end of text."""
    tokens = rng.choice(np.arange(97, 123), n_tokens, p=np.arange(1, 27) / 351)
    tokens[rng.random(n_tokens) < 0.02] = EOT
    tokens[-1] = EOT
    return tokens


def run_config(data: Path, **changes: Any) -> TrainConfig:
    """The small run's config; `changes` name fields as `model__n_layers=3`. Raises ConfigError."""
    config = demo.get_config()
    config.data.path = str(data)
    config.update_from_flattened_dict(OVERRIDES)
    mapping = config.to_dict()
    for name, value in changes.items():
        *groups, field = name.split("__")
        group = mapping
        for key in groups:
            group = group[key]
        group[field] = value  # not through the ConfigDict, which checks some types itself
    return from_mapping(TrainConfig, mapping)


# ---- commands --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Commands:
    """Runs the entry points in processes of their own, which share one cache of compiled functions."""

    cache: Path

    def environment(self, devices: int) -> Mapping[str, str]:
        return {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
            "JAX_COMPILATION_CACHE_DIR": str(self.cache),
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


def train_command(data: Path, workdir: Path, **changes: Any) -> list[str]:
    """The command of the small run; `changes` as in `run_config`."""
    fields = {**OVERRIDES, "data.path": data} | {name.replace("__", "."): value for name, value in changes.items()}
    overrides = [f"--config.{name}={value}" for name, value in fields.items()]
    return ["train.py", "--config=configs/demo.py", f"--workdir={workdir}", *overrides]


def finish(process: subprocess.Popen) -> subprocess.CompletedProcess:
    """Wait for a started command."""
    stdout, stderr = process.communicate(timeout=TIMEOUT)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout.decode(), stderr.decode())


def stop_when(process: subprocess.Popen, moment: Callable[[], bool], signal_number: int) -> subprocess.CompletedProcess:
    """Send a signal as soon as `moment()`, and wait for the end."""
    deadline = time.monotonic() + TIMEOUT
    while not moment():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"the run ended before it was to be stopped: {finish(process).stderr}")
        time.sleep(0.0005)
    process.send_signal(signal_number)
    return finish(process)


# ---- what runs leave -------------------------------------------------------------------------


def read_log(workdir: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl (none if there is no such file yet), read without heinsen."""
    path = workdir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def without_timing(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What must repeat bit for bit: JSON holds the shortest digits that give a float back."""
    return [{name: x for name, x in entry.items() if name not in ("tokens_per_second", "mfu")} for entry in log]


def checkpoint_steps(workdir: Path) -> list[int]:
    """Steps of the whole checkpoints: a save under way has a longer name."""
    folder = workdir / "checkpoints"
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit()) if folder.exists() else []


def snapshot(folder: Path) -> dict[str, str]:
    """Every file in a folder with its digest."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def copy_run(run: Path, workdir: Path, keep: Callable[[int], bool] = lambda step: True) -> Path:
    """A copy of a run, with those of its checkpoints whose step passes `keep`."""
    shutil.copytree(run, workdir)
    for step in checkpoint_steps(workdir):
        if not keep(step):
            shutil.rmtree(workdir / "checkpoints" / str(step))
    return workdir


# ---- fixtures --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that nothing interrupted. Tests read it, or work on a copy."""

    workdir: Path
    data: Path
    stdout: str
    stderr: str

    @property
    def log(self) -> list[dict[str, Any]]:
        return read_log(self.workdir)


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Commands:
    return Commands(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="module")
def compile_cache(commands: Commands) -> Iterator[None]:
    """Share compiled functions with the commands, and among calls that make the same jitted function anew."""
    values = {
        "jax_compilation_cache_dir": str(commands.cache),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in values}
    for name, value in values.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()  # jax decides once whether there is a cache
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 124 training windows: 31 batches an epoch. The texts are the same in every session."""
    folder = tmp_path_factory.mktemp("data") / "letters"
    rng = np.random.default_rng(0)
    write_split(folder / "train", draw_text(rng, 2000))
    write_split(folder / "validation", draw_text(rng, 333))
    return folder


@pytest.fixture(scope="session")
def started(commands: Commands, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Any]]:
    """The uninterrupted run on one device and on four, under way at the same time."""
    workdirs = {devices: tmp_path_factory.mktemp("runs") / f"devices_{devices}" for devices in (1, 4)}
    processes = {n: commands.start(*train_command(data, workdir), devices=n) for n, workdir in workdirs.items()}
    with contextlib.ExitStack() as stack:
        for process in processes.values():
            stack.callback(process.kill)
        yield {n: (process, workdirs[n]) for n, process in processes.items()}


def _wait(started: dict[int, Any], devices: int, data: Path) -> Run:
    process, workdir = started[devices]
    done = finish(process)
    assert done.returncode == 0, done.stderr
    return Run(workdir, data, done.stdout, done.stderr)


@pytest.fixture(scope="session")
def run(started: dict[int, Any], data: Path) -> Run:
    """The uninterrupted run on one device."""
    return _wait(started, 1, data)


@pytest.fixture(scope="session")
def run_on_4_devices(started: dict[int, Any], data: Path) -> Run:
    return _wait(started, 4, data)
