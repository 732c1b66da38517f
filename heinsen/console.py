"""The commands of an installed package: heinsen-train runs train.py, heinsen-sweep scripts/sweep.py, and so on.

A wheel holds the programs and their configs in heinsen/_programs (setup.py); in a clone they are the repository's own.
"""

import importlib.util
import os
import sys
from pathlib import Path
from typing import NoReturn


def train() -> NoReturn:
    _execute("train.py")


def evaluate() -> NoReturn:
    _execute("eval.py")


def generate() -> NoReturn:
    _execute("scripts/generate.py")


def export() -> NoReturn:
    _execute("scripts/export.py")


def sweep() -> NoReturn:
    _execute("scripts/sweep.py")


def plot() -> NoReturn:
    _execute("scripts/plot_runs.py")


def prepare() -> NoReturn:
    _execute("scripts/prepare_data.py")


def _execute(program: str) -> NoReturn:
    """Replace this process by a program, which finds configs and scripts, as do those that it starts."""
    if importlib.util.find_spec("absl") is None or importlib.util.find_spec("flax") is None:
        sys.exit(
            "error: the programs need more packages than the attention: pip install 'heinsen[train]', or in a clone "
            "pip install '.[train]'"
        )
    package = Path(__file__).resolve().parent
    root = package / "_programs" if (package / "_programs").is_dir() else package.parent
    os.environ["PYTHONPATH"] = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.execv(sys.executable, [sys.executable, str(root / program), *sys.argv[1:]])
