"""Fixtures of the small runs in runs.py; `pytest_plugins = ["tests.run_fixtures"]` in a test module brings them."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from tests.runs import Commands, Run, draw_text, finish, train_command, write_split


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Commands:
    return Commands(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="module")
def compile_cache(commands: Commands) -> Iterator[None]:
    """Compile as the commands do, sharing compiled functions with them and among calls that jit the same anew."""
    values = {
        "jax_disable_most_optimizations": True,
        "jax_compilation_cache_dir": str(commands.cache),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in values}
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
            stack.enter_context(process)  # closes its pipes and waits
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
