"""Run the programs hundreds of times, each in a process of its own that need not import JAX again.

    with Programs(environment) as programs:
        end = programs.run(["eval.py", "--workdir=run"], cwd)

A server imports the libraries, without initializing a backend of JAX, and forks for each command.
"""

import dataclasses
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclasses.dataclass(frozen=True)
class End:
    """How a command ended; `status` is None if it was killed for taking too long."""

    status: int | None
    stdout: str
    stderr: str
    seconds: float


class Programs:
    """A server of the entry points, as a context manager."""

    def __init__(self, environment: Mapping[str, str]):
        self._environment = {**environment, "PYTHONPATH": str(ROOT)}

    def __enter__(self) -> "Programs":
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.programs"],
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._server.communicate()

    def run(self, arguments: list[str], cwd: Path, limit: float) -> End:
        """Run a program of this repository in `cwd`, for at most `limit` seconds."""
        request = {"arguments": arguments, "cwd": str(cwd), "limit": limit}
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return End(**json.loads(self._server.stdout.readline()))


# ---- the server ------------------------------------------------------------------------------


def serve() -> None:
    import_libraries()
    for line in sys.stdin:
        print(json.dumps(dataclasses.asdict(execute(**json.loads(line)))), flush=True)


def import_libraries() -> None:
    """Import what the programs import, except those that define flags."""
    import datasets  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import optuna  # noqa: F401
    import submitit  # noqa: F401
    import tiktoken  # noqa: F401
    from absl import app  # noqa: F401
    from ml_collections import ConfigDict  # noqa: F401

    import heinsen.data.prepare
    import heinsen.decoding
    import heinsen.evaluation.split
    import heinsen.evaluation.tables
    import heinsen.plan.plan
    import heinsen.sweep.report
    import heinsen.training.loop
    import heinsen.weights  # noqa: F401

    warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)  # JAX has no threads yet


def execute(arguments: list[str], cwd: str, limit: float) -> End:
    """Run a program in a forked process."""
    started, paths = time.monotonic(), [Path(cwd) / name for name in ("stdout.txt", "stderr.txt")]
    child = os.fork()
    if child == 0:
        become(arguments, cwd, *paths)
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() - started > limit:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            status = None
            break
        time.sleep(0.005)
    else:
        status = os.waitstatus_to_exitcode(ended[1])
    texts = [path.read_text(errors="replace") for path in paths]
    return End(status, *texts, time.monotonic() - started)


def become(arguments: list[str], cwd: str, stdout: Path, stderr: Path) -> None:
    """Turn this process into the program; does not return."""
    os.setpgid(0, 0)
    os.chdir(cwd)
    for number, path in ((0, Path("/dev/null")), (1, stdout), (2, stderr)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, number)
    program, *rest = arguments
    sys.argv = [program, *rest]
    code: object = 1
    try:
        runpy.run_path(str(ROOT / program), run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    serve()
