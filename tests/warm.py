"""Runs scripts in forks of one process that has imported what they import, which takes most of a short command's time.

    python -m tests.warm

Each line of its input is a request in JSON: `arguments` (a script and its own), `devices` (simulated), and the `folder`
with the file stdin, for the files stdout and stderr. The answer is a line with the exit status. A script runs in a
process of its own from its first line to the interpreter's end, as in `python script.py`. Only modules are shared, none
of which holds a state: no flag is defined, and JAX has not looked for devices yet.
"""

import gc
import importlib
import json
import os
import runpy
import sys
import warnings
from pathlib import Path

MODULES = (
    "grain",
    "heinsen.data.preparation",
    "heinsen.decoding",
    "heinsen.evaluation.split",
    "heinsen.training.loop",
    "heinsen.plan.plan",
    "scripts.cli",
)


def run(arguments: list[str], devices: int, folder: str) -> None:
    """Run a script as the main module, with the standard streams in `folder`."""
    import jax

    for stream, name, mode in ((0, "stdin", os.O_RDONLY), (1, "stdout", os.O_WRONLY), (2, "stderr", os.O_WRONLY)):
        os.dup2(os.open(Path(folder, name), mode | os.O_CREAT), stream)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    os.environ["JAX_NUM_CPU_DEVICES"] = str(devices)
    jax.config.update("jax_num_cpu_devices", devices)
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


def main() -> None:
    for name in MODULES:
        importlib.import_module(name)
    gc.freeze()  # or every fork would copy and visit all modules as it ends
    for line in sys.stdin:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of the threads that NumPy's library has started
            child = os.fork()
        if child == 0:
            return run(**json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
