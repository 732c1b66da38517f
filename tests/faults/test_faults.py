"""Faults of the machine during a run: a clear error, whole checkpoints, and the run resumes bit for bit."""

import errno
import os
import shutil

import pytest

from heinsen.data.dataset import DatasetError
from heinsen.training.folder import RunError
from heinsen.training.loop import train
from tests.runs import at_step, checkpoint_steps, read_log, run_config, without_timing

pytest_plugins = ["tests.run_fixtures"]
pytestmark = pytest.mark.usefixtures("compile_cache")


def no_space():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.long
def test_a_full_disk_is_named_and_the_run_resumes_when_there_is_space(run, tmp_path):
    """While metrics are written; `tests/training/test_checkpoint.py` covers checkpoints."""
    config, workdir = run_config(run.data), tmp_path / "run"
    with pytest.raises(RunError) as error, pytest.MonkeyPatch.context() as patch:
        at_step(patch, 25, no_space)
        train(config, workdir)
    assert f"{workdir} cannot be written" in str(error.value) and "No space left on device" in str(error.value)
    assert f"resume from {workdir / 'checkpoints' / '20'}" in str(error.value)
    assert checkpoint_steps(workdir)[-1] == 20
    train(config, workdir)
    assert without_timing(read_log(workdir)) == without_timing(run.log)


@pytest.mark.parametrize("place", ["a file", "a file/run", "/proc/run"])
def test_a_folder_that_cannot_be_made_is_named(data, tmp_path, place):
    (tmp_path / "a file").write_text("mine")
    with pytest.raises(RunError, match="cannot be written.*Give another --workdir"):
        train(run_config(data), tmp_path / place)
    assert (tmp_path / "a file").read_text() == "mine"


@pytest.mark.long
def test_data_that_vanish_during_a_run_are_named(run, tmp_path, monkeypatch):
    """An error, not a crash: reading a truncated memory-mapped file would end the process by SIGBUS."""
    data = shutil.copytree(run.data, tmp_path / "data")
    config, workdir = run_config(data), tmp_path / "run"
    at_step(monkeypatch, 25, lambda: os.truncate(data / "train" / "shard-00000.npy", 200))
    with pytest.raises(DatasetError, match="shard-00000.npy"):
        train(config, workdir)
    assert checkpoint_steps(workdir)[-1] == 20
