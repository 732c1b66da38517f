"""Fixtures for the small runs of runs.py. A test module loads them with `pytest_plugins = ["tests.run_fixtures"]`."""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
import zstandard
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from tests.runs import TIMEOUT, Commands, Run, draw_text, train_command, write_split


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder shared by all processes of a pytest-xdist session."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def commands(shared: Path) -> Iterator[Commands]:
    with contextlib.closing(Commands(shared / "compiled")) as commands:
        yield commands


@pytest.fixture(scope="module")
def compile_cache(commands: Commands) -> Iterator[None]:
    """Compile as the commands do, and share compiled functions with them and among repeated jits of a function."""
    values = {
        "jax_disable_most_optimizations": True,
        "jax_compilation_cache_dir": str(commands.cache),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in values}
    for name, value in values.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()  # jax checks only once whether there is a cache
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()


@pytest.fixture(scope="session")
def data(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dataset of 124 training windows, 31 batches per epoch. The texts are the same in every session."""
    made = tmp_path_factory.mktemp("data") / "letters"
    rng = np.random.default_rng(0)
    write_split(made / "train", draw_text(rng, 2000))
    write_split(made / "validation", draw_text(rng, 333))
    with contextlib.suppress(OSError):  # another process has written the same data first
        made.rename(shared / "letters")
    return shared / "letters"


@pytest.fixture(scope="session")
def started(commands: Commands, data: Path, shared: Path) -> Iterator[dict[int, Path]]:
    """Folders of the uninterrupted runs on one device and on four, which start at the same time, once per session."""
    folders = {devices: shared / f"devices_{devices}" for devices in (1, 4)}
    processes = []
    for devices, folder in folders.items():
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            processes.append(commands.start_into(folder, *train_command(data, folder / "run"), devices=devices))
    yield folders
    for process in processes:  # other test processes may be waiting for it
        process.wait(TIMEOUT)


def _wait(folder: Path, data: Path) -> Run:
    deadline = time.monotonic() + TIMEOUT
    while not (folder / "status").exists():
        assert time.monotonic() < deadline, "the run takes too long"
        time.sleep(0.05)
    stdout, stderr = ((folder / name).read_text() for name in ("stdout", "stderr"))
    assert (folder / "status").read_text() == "0\n", stderr
    return Run(folder / "run", data, stdout, stderr)


@pytest.fixture(scope="session")
def run(started: dict[int, Path], data: Path) -> Run:
    """Uninterrupted run on one device."""
    return _wait(started[1], data)


@pytest.fixture(scope="session")
def run_on_4_devices(started: dict[int, Path], data: Path) -> Run:
    return _wait(started[4], data)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of documents in The Pile's format, made of words with unequal frequencies."""
    folder, rng = tmp_path_factory.mktemp("corpus"), np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefgh"), n)) for n in rng.integers(2, 7, 50)]
    for name, count in (("train-00", 300), ("train-01", 100), ("validation", 20), ("test", 20)):
        lines = []
        for i in range(count):
            text = " ".join(rng.choice(words, 100, p=np.arange(1, 51) / 1275))
            lines.append(json.dumps({"text": text, "meta": {"pile_set_name": "AB"[i % 2]}}))
        (folder / f"{name}.jsonl.zst").write_bytes(zstandard.compress("\n".join(lines).encode()))
    return folder
