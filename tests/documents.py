"""The commands in a Markdown text, the errors of their programs, and the browser that shows pages."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import ROOT, TIMEOUT

# Parse the arguments of many commands as their programs do, in one process. Prints the error of each, or null.
PARSE = r"""
import contextlib, io, json, runpy, sys
import absl.app, absl.logging
from absl import flags

from heinsen.training import data

absl.app.run = lambda main, flags_parser: flags_parser(sys.argv)
data._read_vocab_size = lambda path: 257

def parse(program, arguments):
    before, argv = set(flags.FLAGS), [program, *arguments]
    try:
        if program.startswith("experiments/"):  # whose flags are defined where they run
            sys.argv = argv
            runpy.run_path(program, run_name="__main__")
            return None
        module = runpy.run_path(program)
        names = "benchmark", "compare_runs", "plot_runs", "prepare_data"
        takes_arguments = program in (f"scripts/{name}.py" for name in names)
        module["parse_flags"](argv, **({"takes_arguments": True} if takes_arguments else {}))
        if program == "eval.py":
            module["read_run_config"]()
        if program == "train.py":
            data.train_config(module["read_config"](module["CONFIG"]))
        if program == "scripts/sweep.py" and module["CONFIG"].value is not None:
            first = {name: text.split(",")[0] for name, text in module["SWEPT"].items()}
            from scripts.cli import given_fields
            from scripts.sweep_runs import RunFactory

            RunFactory(module["CONFIG"].value, given_fields(), check_data=False).make(first)
        return None
    except (SystemExit, Exception) as error:
        return repr(error)
    finally:
        for name in set(flags.FLAGS) - before:
            delattr(flags.FLAGS, name)
        flags.FLAGS.unparse_flags()

commands = json.load(sys.stdin)
with contextlib.redirect_stdout(io.StringIO()):
    errors = [parse(*command) for command in commands]
print(json.dumps(errors))
"""


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Return (program, arguments) of each command of this repository in the indented blocks of a Markdown text."""
    lines = re.sub(r"\\\n\s+", "", text).splitlines()
    found = []
    for line in (line for line in lines if line.startswith("    ")):
        for part in re.split(r"\bdo |; done|[&|] ", line):
            words = shlex.split(part.strip(), comments=True)
            wrapped = [word.removeprefix("--wrap=") for word in words if word.startswith("--wrap=")]
            if wrapped:  # in a job of SLURM
                words = shlex.split(wrapped[0].replace("$SLURM_ARRAY_TASK_ID", "0"))
            if words[:1] == ["python"] and words[1] != "-m":
                found.append((words[1], [word.replace("$i", "0") for word in words[2:]]))
            elif words[:1] == ["sbatch"]:
                found.append(("train.py", words[words.index("scripts/train.slurm") + 1 :]))
    return found


def errors_of(found: list[tuple[str, list[str]]], runs: Path) -> list[str | None]:
    """Return each program's error for its arguments, or None; the folder `runs` takes the place of runs/."""
    moved = [(program, [a.replace("=runs/", f"={runs}/") for a in arguments]) for program, arguments in found]
    result = subprocess.run(
        [sys.executable, "-c", PARSE],
        input=json.dumps(moved),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def find_chromium() -> str:
    """Return the browser's program, or skip the test."""
    found = filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
    return next(found, None) or pytest.skip("no Chromium here: apt-get install chromium")
