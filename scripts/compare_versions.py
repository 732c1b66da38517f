"""Time the attention of this checkout, or its training step, beside that of another commit, in one process.

    python scripts/compare_versions.py --old=COMMIT [--repeats=41] [--tokens=1024] [--heads=16]
    python scripts/compare_versions.py --old=COMMIT --config=configs/NAME.py [--repeats=41 --config.any.field=value ...]

The other commit's package is imported under another name. Calls of the two alternate, attention forward and with
gradients, and each row prints the ratio of their medians, new over old, the new median, and the seconds that compiling
took. With --config it is the training step of that config, on random tokens.
"""

import dataclasses
import importlib
import importlib.util
import io
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import app, flags, logging

from heinsen.errors import InputError, exit_on_error
from scripts.cli import parse_flags, read_config, show_help

OLD = flags.DEFINE_string("old", None, "Commit to compare with.", required=True)
REPEATS = flags.DEFINE_integer("repeats", 41, "Timed calls of each.", lower_bound=1)
TOKENS = flags.DEFINE_integer("tokens", 1024, "Tokens of a sequence.", lower_bound=1)
CONFIG = flags.DEFINE_string("config", None, "Compare training steps of this file of configs/, which both can read.")
HEADS = flags.DEFINE_integer("heads", 16, "Heads of a sequence.", lower_bound=1)
show_help(__name__)

import jax
import jax.numpy as jnp
import numpy as np

import heinsen
from heinsen.host import keep_host_memory
from heinsen.training.data import train_config

ROOT = Path(__file__).resolve().parent.parent
FEATURES = 30

# (function, options); a name in place of a value stands for an array that is drawn
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "log values": ("log_attention", {}),
    "real values": ("attention", {}),
    "gate": ("log_attention", {"log_decay": "decays"}),
    "documents": ("log_attention", {"segment_ids": "documents"}),
    "gate, documents": ("log_attention", {"log_decay": "decays", "segment_ids": "documents"}),
    "all keys": ("log_attention", {"causal": False}),
    "all keys, real values": ("attention", {"causal": False}),
    "all keys of documents": ("log_attention", {"causal": False, "segment_ids": "documents"}),
}


def main(argv: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    keep_host_memory()
    with exit_on_error(), tempfile.TemporaryDirectory() as folder:
        old = import_old(Path(folder))
        if CONFIG.value is not None:
            values = dataclasses.asdict(train_config(read_config(CONFIG)))
            print(compare(make_step(old, values), make_step(heinsen, values), ()))
            return
        rng = np.random.default_rng(0)
        draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
        q, k, values = (draw(1, HEADS.value, TOKENS.value, FEATURES) for _ in range(3))
        arrays = {
            "decays": -0.1 * jnp.abs(draw(1, HEADS.value, TOKENS.value)),
            "documents": jnp.asarray(np.sort(rng.integers(0, 5, (1, 1, TOKENS.value)))),
        }
        print(f"{'':24}  forward: ratio, ms, compiled in s   with gradients")
        for name, (function, options) in CASES.items():
            given = {key: arrays.get(x, x) if isinstance(x, str) else x for key, x in options.items()}
            row = [
                compare(make(getattr(old, function), given), make(getattr(heinsen, function), given), (q, k, values))
                for make in (make_forward, make_gradients)
            ]
            print(f"{name:24}  " + "   ".join(row), flush=True)


def import_old(folder: Path) -> Any:
    """The package of --old, with its imports of itself renamed. Raises InputError."""
    done = subprocess.run(["git", "archive", OLD.value, "heinsen"], cwd=ROOT, capture_output=True)
    if done.returncode:
        raise InputError(f"--old={OLD.value} is no commit of this checkout: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as files:
        files.extractall(folder, filter="data")
    package = (folder / "heinsen").rename(folder / "heinsen_old")
    for file in package.rglob("*.py"):
        file.write_text(re.sub(r"\b(from|import) heinsen\b", r"\1 heinsen_old", file.read_text()))
    spec = importlib.util.spec_from_file_location(
        "heinsen_old", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["heinsen_old"] = module
    spec.loader.exec_module(module)
    return module


def make_forward(function: Callable[..., Any], given: dict[str, Any]) -> Callable[..., Any]:
    return jax.jit(lambda *arrays: function(*arrays, **given))


def make_gradients(function: Callable[..., Any], given: dict[str, Any]) -> Callable[..., Any]:
    return jax.jit(jax.grad(lambda *arrays: jnp.sum(jnp.sin(function(*arrays, **given))), argnums=(0, 1, 2)))


def make_step(package: Any, values: dict[str, Any]) -> Callable[[], Any]:
    """A call that takes a training step of the config that has these values."""
    part = lambda name: importlib.import_module(f"{package.__name__}.{name}")
    config = part("config").from_mapping(part("training.config").TrainConfig, values)
    optimizer = part("training.optimizer").make_optimizer(config.optimizer, config.total_steps)
    mesh, steps = part("parallel").make_mesh(), part("training.step")
    state = steps.init_train_state(config.model, optimizer, config.seed, mesh)
    shape = config.accumulation_steps, config.batch_size // config.accumulation_steps, config.sequence_length + 1
    tokens = jax.random.randint(jax.random.key(0), shape, 0, config.model.vocab_size)
    step = steps.make_train_step(config.model, optimizer, mesh)

    def take_step() -> Any:
        nonlocal state
        state, metrics = step(state, tokens)
        return metrics

    return take_step


def seconds(call: Callable[..., Any], arrays: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call(*arrays))
    return time.perf_counter() - start


def compare(old: Callable[..., Any], new: Callable[..., Any], arrays: Any) -> str:
    """Ratio of medians, the new median in ms, and how long each took to compile."""
    compiled = [seconds(call, arrays) for call in (old, new)]
    times = [[seconds(call, arrays) for call in (old, new)] for _ in range(REPEATS.value)]
    before, after = (statistics.median(column) for column in zip(*times, strict=True))
    return f"{after / before:5.2f} {1e3 * after:7.1f} ms {compiled[1]:5.1f} ({compiled[0]:.1f} before)"


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
