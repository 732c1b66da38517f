"""A run that is killed at random moments, also within saves, ends as if nothing had happened, bit for bit.

HEINSEN_KILLS is the number of kills.
"""

import os
import signal
import time

import numpy as np
import pytest

from tests.runs import finish, newest_checkpoint, read_log, run_config, train_command, without_timing

pytest_plugins = ["tests.run_fixtures"]
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("compile_cache")]

KILLS = int(os.environ.get("HEINSEN_KILLS", 25))
STEPS = 40 * (KILLS + 1)
CHANGES = {"total_tokens": STEPS * 4 * 16, "checkpoint_every": 7, "validate_every": 50, "validation_tokens": 50}


def saves(workdir) -> bool:
    """Return whether a checkpoint is being written: its folder has a longer name until it is whole."""
    folder = workdir / "checkpoints"
    return folder.exists() and any(not path.name.isdigit() for path in folder.iterdir())


def kill(process, workdir, rng) -> str:
    """Kill it at one of three kinds of moments: during start-up, after some steps, within a save."""
    step = lambda: read_log(workdir)[-1]["step"] if read_log(workdir) else 0
    kind = rng.choice(["starting", "stepping", "saving"], p=[0.15, 0.35, 0.5])
    until, first = time.monotonic() + rng.uniform(0, 3), step() + rng.integers(1, 30)
    now = {
        "starting": lambda: time.monotonic() > until,
        "stepping": lambda: step() >= first,
        "saving": lambda: step() >= first and saves(workdir),
    }[kind]
    while not now() and process.poll() is None:
        time.sleep(0.0003)
    process.send_signal(signal.SIGKILL)
    return f"{kind} at {step()}"


def test_a_run_killed_again_and_again_ends_as_one_that_was_not(commands, data, rng, tmp_path, capsys):
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    command = train_command(data, killed, **CHANGES)
    other = commands.start(*train_command(data, undisturbed, **CHANGES))
    moments = []
    while len(moments) < KILLS:
        process = commands.start(*command)
        moments.append(kill(process, killed, rng))
        if finish(process).returncode == 0:  # it was faster
            break
    with capsys.disabled():
        print(f" [killed while {', '.join(moments)}]", end="")
    assert finish(other).returncode == 0
    done = commands.run(*command)
    assert done.returncode == 0, done.stderr
    config = run_config(data, **CHANGES)
    (step, state, progress), expected = newest_checkpoint(killed, config), newest_checkpoint(undisturbed, config)
    assert step == expected[0] == STEPS and progress == expected[2]
    for actual, wanted in zip(state, expected[1], strict=True):
        np.testing.assert_array_equal(actual, wanted)
    assert without_timing(read_log(killed)) == without_timing(read_log(undisturbed))
