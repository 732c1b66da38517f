"""A run of two processes loses one: the other one exits with one line, and both resume."""

import signal
import time

import pytest

from tests.runs import checkpoint_steps, finish, read_log, send_when
from tests.test_parallel import losses, start_two

pytest_plugins = ["tests.run_fixtures"]
pytestmark = pytest.mark.long

PEER_TIMEOUT = 20  # seconds


@pytest.mark.parametrize(
    ("lost", "how", "when"),
    [
        (1, signal.SIGKILL, 15),
        (1, signal.SIGKILL, 19),
        (0, signal.SIGKILL, 15),
        (1, signal.SIGSTOP, 15),
    ],
)
def test_the_process_that_is_left_exits_with_one_line_and_both_resume(run, commands, tmp_path, lost, how, when):
    """Process 0 coordinates: JAX aborts the others where it is lost, and they learn of others by it."""
    workdir = tmp_path / "run"
    processes = start_two(commands, run.data, workdir, f"--peer_timeout={PEER_TIMEOUT}")
    try:
        send_when(processes[lost], lambda: any(entry["step"] >= when for entry in read_log(workdir)), how)
        start = time.monotonic()
        left = finish(processes[1 - lost])
        assert time.monotonic() - start < PEER_TIMEOUT + 10
    finally:
        for process in processes:
            process.kill()
        finish(processes[lost])
    assert left.returncode == 1
    last = left.stderr.splitlines()[-1]
    assert last.startswith("error: another process of the run failed or was lost")
    assert "Restart all of them to resume the run" in last and "Traceback" not in left.stderr
    step = checkpoint_steps(workdir)[-1]

    done = [finish(process) for process in start_two(commands, run.data, workdir)]
    assert [d.returncode for d in done] == [0, 0], done[0].stderr + done[1].stderr
    assert f"resuming after step {step}" in done[0].stderr
    assert losses(read_log(workdir)) == pytest.approx(losses(run.log), rel=1e-4)
