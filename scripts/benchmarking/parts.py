"""Programs that run one after another within a total time, each in a process of its own, and are not repeated."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from heinsen.files import make_folder, write_atomically

ROOT = Path(__file__).resolve().parent.parent.parent

PROGRAM = "scripts/benchmark.py"

DONE, FAILED, STOPPED, NOT_STARTED = "done", "failed", "stopped at its limit", "not started: no time left"
_LAST_LINES = 12  # of a part that has failed, in the report
_LEAST = 5.0  # seconds, with less of which no part is begun
_MEASURING = 0.7  # share of a part's time after which it begins nothing more, and writes what it has


@dataclass(frozen=True)
class Part:
    """A benchmark of scripts/benchmark.py with its flags, which writes results.json and pictures to OUT/name.

    It gets at most the share weight / (sum of its and all later weights) of the time that is left. If it `can_stop`, it
    takes --stop_after.
    """

    name: str
    title: str
    arguments: tuple[str, ...]
    weight: float
    can_stop: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a part ended: DONE, FAILED, STOPPED or NOT_STARTED.

    text is what it has printed on stdout; if it has not ended well, its last lines. result is its results.json, of a
    part that was stopped those up to then; None if there are none.
    """

    state: str
    seconds: float
    text: str
    result: dict[str, Any] | None


def run_parts(parts: Sequence[Part], out: Path, end: float) -> dict[str, Outcome]:
    """Run the parts in order until `end`, a time of time.monotonic(), and return how each ended, by name.

    A part that is done is kept in OUT/name.json, and not repeated with the same flags. OUT/name.log receives what it
    says on stderr; lines on stderr here say what is running and how much time it has left. Ends a part's process and
    its children when its time is over, and on Ctrl-C.
    """
    make_folder(out)
    outcomes = read_kept(parts, out)
    for part in outcomes:
        _say(f"{part}: kept from before")
    left = [part for part in parts if part.name not in outcomes]
    for i, part in enumerate(left):
        rest = end - time.monotonic()
        limit = rest * part.weight / sum(each.weight for each in left[i:])
        if limit < _LEAST:
            outcomes[part.name] = Outcome(NOT_STARTED, 0.0, "", None)
            continue
        _say(f"{part.name} ({i + 1} of {len(left)}): at most {limit:.0f} s; {rest:.0f} s are left in all")
        outcome = outcomes[part.name] = _run(part, out, limit)
        _say(f"{part.name}: {outcome.state} after {outcome.seconds:.0f} s")
        if outcome.state == DONE:
            record = dict(arguments=part.arguments, seconds=outcome.seconds, text=outcome.text, result=outcome.result)
            write_atomically(_kept_file(part, out), json.dumps(record) + "\n")
    return {part.name: outcomes[part.name] for part in parts}


def read_kept(parts: Sequence[Part], out: Path) -> dict[str, Outcome]:
    """Return the outcomes of the parts that are done, by name."""
    return {part.name: kept for part in parts if (kept := _read_kept(part, out)) is not None}


def _kept_file(part: Part, out: Path) -> Path:
    return out / f"{part.name}.json"


def _read_kept(part: Part, out: Path) -> Outcome | None:
    file = _kept_file(part, out)
    if not file.exists() or (kept := json.loads(file.read_text()))["arguments"] != list(part.arguments):
        return None
    return Outcome(DONE, kept["seconds"], kept["text"], kept["result"])


def _run(part: Part, out: Path, limit: float) -> Outcome:
    folder, start = out / part.name, time.monotonic()
    stop = [f"--stop_after={_MEASURING * limit:.0f}"] if part.can_stop else []
    command = [sys.executable, PROGRAM, *part.arguments, *stop, f"--out={folder.absolute()}"]
    results = folder / "results.json"
    results.unlink(missing_ok=True)  # of other flags, or of a process that was stopped
    options: Mapping[str, Any] = dict(cwd=ROOT, env=_environment(out), encoding="utf-8", errors="replace")
    last: deque[str] = deque(maxlen=_LAST_LINES)
    with (out / f"{part.name}.log").open("w") as log, tempfile.TemporaryFile("w+", encoding="utf-8") as text:
        # A session of its own, so that its children end with it.
        with subprocess.Popen(
            command, stdout=text, stderr=subprocess.PIPE, start_new_session=True, **options
        ) as process:
            reader = threading.Thread(target=_pass_on, args=(process.stderr, log, last, part.name, start + limit))
            try:
                reader.start()
                status: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                reader.join()
        seconds = time.monotonic() - start
        result = json.loads(results.read_text()) if results.exists() else None
        if status == 0 and result is not None:
            text.seek(0)
            return Outcome(DONE, seconds, text.read(), result)
    return Outcome(STOPPED if status is None else FAILED, seconds, "\n".join(last), result)


def _environment(out: Path) -> dict[str, str]:
    """Return the environment of all parts: they share a cache of compiled programs, and print without delay."""
    cache = str((out / "compiled").absolute())
    return {**os.environ, "JAX_COMPILATION_CACHE_DIR": cache, "PYTHONUNBUFFERED": "1"}


def _pass_on(stream: IO[str], log: IO[str], last: deque[str], name: str, end: float) -> None:
    """Write a part's lines to its log, keep the last ones, and show them with the time that it has left."""
    for line in stream:
        log.write(line)
        log.flush()
        last.append(line.rstrip("\n"))
        _say(f"{name}, {max(0.0, end - time.monotonic()):.0f} s left: {line.rstrip()}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
