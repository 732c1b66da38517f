"""A sweep whose runs are not training: a script that logs, saves and obeys SIGTERM as train.py does, in no time.

python fake.py FOLDER BEHAVIOUR     as the run itself: finish, crash (once, at step 3), or slow (20 steps per second)
python -m tests.sweep.fake SWEEP    as the sweep command: a slow run and a quick one, one at a time
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

STEPS, SLOW_STEPS = 4, 30


def train(folder: Path, behaviour: str) -> int:
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    with (folder / "starts").open("a") as file:
        file.write(json.dumps(sorted(os.sched_getaffinity(0))) + "\n")
    saved = folder / "saved"
    first = int(saved.read_text()) + 1 if saved.exists() else 1
    for step in range(first, (SLOW_STEPS if behaviour == "slow" else STEPS) + 1):
        entry = {"step": step, "tokens": 10 * step, "loss": 5 / step, "tokens_per_second": 100.0}
        if step % 2 == 0:
            entry |= {"validation_loss": 6 / step, "validation_bits_per_byte": 2 / step}
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")
        saved.write_text(str(step))
        if behaviour == "crash" and step == 3:
            print("error: this is what went wrong", flush=True)
            return 1
        if behaviour == "slow":
            time.sleep(0.05)
        if asked:
            return 75
    return 0


def sweep(path: Path) -> None:
    """Raises SweepInterruption."""
    from heinsen.sweep.driver import drive
    from heinsen.sweep.folder import SweepFolder
    from heinsen.sweep.launcher import LaunchOptions, LocalLauncher
    from heinsen.sweep.search import ListSearch

    whole = definition({"behaviour": ("slow", "finish")}, seeds=(0,))
    folder = SweepFolder.open_or_create(path, whole, runs("slow", "finish", seed=0))
    with folder.lock():
        drive(folder, ListSearch(folder), LocalLauncher(folder, command, LaunchOptions(parallel=1)))


def runs(*behaviours, **point):
    """Return the runs of a sweep with these behaviours."""
    from heinsen.sweep.runs import SweepRun

    n_steps = lambda behaviour: SLOW_STEPS if behaviour == "slow" else STEPS
    return [SweepRun({"behaviour": each, **point}, n_steps(each), 10) for each in behaviours]


def definition(space, **changes):
    from heinsen.sweep.definition import Definition

    fields = dict(config="c.py", overrides={}, base={"seed": 0}, seeds=None, search="grid", trials=None, search_seed=0)
    return Definition(**(fields | {"space": space} | changes))


def wait_until(condition, what, patience):
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def command(run, where: Path) -> list[str]:
    return [sys.executable, __file__, str(where), run.point["behaviour"]]


if __name__ == "__main__":
    if len(sys.argv) == 3:
        sys.exit(train(Path(sys.argv[1]), sys.argv[2]))
    sweep(Path(sys.argv[1]))
