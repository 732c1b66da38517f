"""What a query, a flag and a batch go through, as docs/design.md lists it."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from heinsen.models import forward, init_params, unstack
from heinsen.models.mixers import TokenContext
from heinsen.training.loop import train
from tests.model_configs import model_config
from tests.runs import BATCH, at_step, run_config

pytest_plugins = ["tests.run_fixtures"]

ROOT = Path(__file__).resolve().parents[2]
FLAG = "--config.model.forget_gate=head"
WINDOW = 37  # tokens
MARK = 0.7182818  # the value of every feature of every query


Step = tuple[str, str]  # a file, and a function in it


def walk(run: Callable[[], object], is_marked: Callable[[object], bool], *folders: str) -> list[Step]:
    """The functions of these files and folders that take or return what is marked, in the order of their calls.

    Functions within a function belong to it.
    """
    found: dict[Step, None] = {}
    busy = False

    def profile(frame, event, returned):
        nonlocal busy
        code = frame.f_code
        if busy or event not in ("call", "return") or not code.co_filename.startswith(starts):
            return
        if code.co_name in ("<dictcomp>", "<listcomp>", "<setcomp>"):  # functions in Python 3.11 alone
            return
        busy = True  # looking at values calls functions too
        try:
            if any(map(is_marked, frame.f_locals.values() if event == "call" else [returned])):
                file = str(Path(code.co_filename).relative_to(ROOT))
                found[file, code.co_qualname.split(".<locals>")[0]] = None
        finally:
            busy = False

    starts = tuple(str(ROOT / folder) for folder in folders)
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return [step for step in found if step[0] != "heinsen/promotion.py"]  # which wraps functions, and does nothing else


def n_lines(file: str, function: str) -> int:
    """Length of a function, from its signature to its end."""
    body = ast.parse((ROOT / file).read_text()).body
    for name in function.split("."):
        (node,) = (x for x in body if getattr(x, "name", "") == name and not is_overload(x))
        body = node.body
    return node.end_lineno - node.lineno + 1


def is_overload(node: ast.AST) -> bool:
    return any(ast.unparse(x) == "overload" for x in node.decorator_list)


def listed(title: str) -> list[tuple[str, str]]:
    """The (file, function) pairs of a walk in docs/design.md."""
    text = (ROOT / "docs/design.md").read_text().split(f"**{title}**")[1].split("\n\n")[1]
    rows = re.findall(r"^\| `(.*?)` \| (.*?) \|", text, re.M)
    return [(file, name) for file, names in rows for name in re.findall("`(.*?)`", names)]


def is_query(x: object) -> bool:
    """Whether x has an array of floats of at least two axes all of which are MARK."""
    if not isinstance(x, tuple | list | dict | jax.Array):
        return False
    arrays = (a for a in jax.tree.leaves(x) if isinstance(a, jax.Array) and a.ndim >= 2)
    arrays = (np.asarray(a) for a in arrays if not isinstance(a, jax.core.Tracer) and a.dtype == jnp.float32)
    return any(a.size > 0 and np.all(np.abs(a - MARK) < 1e-6) for a in arrays)


def test_a_query():
    config = model_config(n_layers=1, position="none")
    params = unstack(config, init_params(config, jax.random.key(0)))
    w1 = params["layer_0"]["w1"]
    of_queries = np.arange(w1["bias"].size) % (2 * config.d_key + config.d_value) < config.d_key
    w1["kernel"] = jnp.where(of_queries, 0, w1["kernel"])
    w1["bias"] = jnp.where(of_queries, MARK, w1["bias"])
    with jax.disable_jit():
        found = walk(lambda: forward(config, params, jnp.arange(4)[None]), is_query, "heinsen")
    print(*found, sep="\n")
    assert found == listed("A query")
    assert len({file for file, _ in found}) <= 8 and len(found) <= 20
    assert max(n_lines(*x) for x in found) <= 60


# ---- a flag ---------------------------------------------------------------------------------------


def is_gate(x: object) -> bool:
    """Whether x is the flag --config.model.forget_gate=head, its value, or a mapping of fields that has it."""
    if isinstance(x, list | tuple):
        return any(map(is_gate, x))
    if isinstance(x, str):
        return x in ("head", FLAG)
    if isinstance(x, Mapping | ConfigDict):
        return x.get("model.forget_gate", x.get("forget_gate")) == "head" or is_gate(x.get("model"))
    return False


def parse_train_flags() -> None:
    """What train.py does with its flags, in a process of its own, whose flags they are."""
    import train
    from heinsen.training.data import train_config
    from scripts.cli import parse_flags, read_config

    def run() -> None:
        parse_flags(["train.py", "--config=configs/pile_125m.py", FLAG, "--plan"])
        train_config(read_config(train.CONFIG))

    print(json.dumps(walk(run, is_gate, "heinsen", "scripts")))


def test_a_flag():
    code = "from tests.docs import test_walks; test_walks.parse_train_flags()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [tuple(x) for x in json.loads(done.stdout)]
    print(*found, sep="\n")
    assert found == listed("A flag")


# ---- a batch --------------------------------------------------------------------------------------


def is_batch(x: object) -> bool:
    """Whether x has an array of integers, traced or not, with as many tokens as only the batches here."""
    if not isinstance(x, tuple | list | dict | jax.Array | np.ndarray):
        return False
    leaves = jax.tree.leaves(x, is_leaf=lambda x: isinstance(x, TokenContext))
    arrays = (a for a in leaves if isinstance(a, jax.Array | np.ndarray) and a.ndim)
    return any(a.shape[-1] in (WINDOW - 1, WINDOW) and jnp.issubdtype(a.dtype, jnp.integer) for a in arrays)


class Enough(Exception):
    pass


def test_a_batch(data, tmp_path, monkeypatch):
    def stop() -> None:
        raise Enough

    def run() -> None:
        with pytest.raises(Enough):
            train(config, tmp_path / "run")

    sizes = dict(sequence_length=WINDOW - 1, total_tokens=9 * BATCH * (WINDOW - 1), validate_every=9)
    config = run_config(data, **sizes, optimizer__warmup_steps=1)
    at_step(monkeypatch, 1, stop)
    found = walk(run, is_batch, "heinsen")
    print(*found, sep="\n")
    assert set(found) == set(listed("A batch"))  # functions that make one are found when they end
