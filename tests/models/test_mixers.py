"""The mixer interface: one more kind by one class and one registration; and nobody asks which kind it has."""

import ast
from pathlib import Path

import jax
import numpy as np
import pytest

from heinsen.config import ConfigError
from heinsen.decoding import Sampling, generate
from heinsen.models import forward, init_params, mean_loss
from heinsen.models.config import BLOCKS, POSITIONS
from heinsen.models.language_model import LAYERS
from heinsen.models.mixers import MIXERS
from heinsen.models.positions import POSITION_CLASSES
from tests.model_configs import model_config
from tests.models.model64 import MovingAverage

pytest_plugins = ["tests.run_fixtures"]
pytestmark = pytest.mark.usefixtures("compile_cache")

# ---- one more kind -------------------------------------------------------------------------------


def test_without_registration_it_is_no_kind():
    """tests/models/test_kinds.py registers it, and has its model, state and refusals among those of all kinds."""
    assert "moving_average" not in MIXERS
    with pytest.raises(ConfigError, match="'moving_average' is no kind of attention; choose heinsen, softmax,"):
        model_config(attention="moving_average")


@pytest.mark.parametrize(
    "attention", ["moving_average", pytest.param("heinsen,moving_average", marks=pytest.mark.long)]
)
def test_it_trains_and_decodes_what_the_forward_pass_finds_likeliest(attention, monkeypatch, rng):
    monkeypatch.setitem(MIXERS, "moving_average", MovingAverage.from_config)
    n_layers = 1 + attention.count(",")
    config = model_config(attention=attention, n_layers=n_layers, document_token=5, implementation="reference")
    params = jax.jit(init_params, static_argnums=0)(config, jax.random.key(int(rng.integers(2**31))))
    params |= {"embedding": 10 * params["embedding"]}  # large enough to decide between tokens
    prompt = np.int32([5, *rng.integers(6, 257, 10)])
    written = list(generate(config, params, prompt, Sampling(temperature=0.0), seed=0, max_tokens=12))
    logits, _ = jax.jit(forward, static_argnums=0)(config, params, np.array([*prompt, *written])[None])
    np.testing.assert_array_equal(np.argmax(logits[0, 10:-1, :257], axis=-1), written)
    text = np.tile(rng.integers(6, 257, 4), 9)[None, :33].repeat(2, axis=0)

    @jax.jit
    def step(params):
        loss, grads = jax.value_and_grad(lambda p: mean_loss(config, p, text))(params)
        return jax.tree.map(lambda p, g: p - 0.02 * g, params, grads), loss

    losses = []
    for _ in range(20):
        params, loss = step(params)
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]


def test_every_name_of_a_block_and_a_position_has_its_class():
    assert set(LAYERS) == set(BLOCKS) and set(POSITION_CLASSES) == set(POSITIONS)


# ---- nobody asks for a kind ----------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
MIXER_FILES = "heinsen/models/mixers"
KINDS = set(MIXERS)
# Modules that belong to one kind, and the classes of their states.
KIND_MODULES = {"heinsen.ops.states", *(f"heinsen.ops.{kind}" for kind in KINDS)}
KIND_MODULES |= {f"{MIXER_FILES.replace('/', '.')}.{kind}" for kind in KINDS}
STATES = {"LogState", "MeanState", "RunningState", "KVCache", "LinearState", "DeltaState"}


def strings_in(node: ast.AST) -> set[str]:
    return {x.value for x in ast.walk(node) if isinstance(x, ast.Constant) and isinstance(x.value, str)}


def names_in(node: ast.AST) -> set[str]:
    names = {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}
    return names | {x.attr for x in ast.walk(node) if isinstance(x, ast.Attribute)}


def questions(source: str) -> list[str]:
    """Expressions that ask for a kind of attention by its name or by the class of its state."""
    found = []
    for node in ast.walk(ast.parse(source)):
        is_comparison = isinstance(node, ast.Compare | ast.MatchValue)
        is_check = isinstance(node, ast.Call) and names_in(node.func) & {"isinstance", "issubclass"}
        if is_comparison and strings_in(node) & KINDS or (is_comparison or is_check) and names_in(node) & STATES:
            found.append(ast.unparse(node))
    return found


def imported(source: str) -> set[str]:
    """Modules of kinds and names of states that are imported."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            found |= {alias.name for alias in node.names}
    return found & (KIND_MODULES | STATES)


def test_questions_and_imports_are_found():
    assert len(questions("if kind == 'softmax' or isinstance(state, (KVCache, int)):\n    pass")) == 2
    assert len(questions("x = {'linear', 'other'} & set(p) == set()\ny = type(s) is states.LogState")) == 2
    assert questions("match kind:\n    case 'sigmoid':\n        pass") == ["'sigmoid'"]
    assert questions("x = 'softmax'; y = isinstance(x, Mixer)") == []
    assert imported("from heinsen.ops import softmax\nfrom heinsen.ops.states import LogState") == {
        "heinsen.ops.softmax",
        "heinsen.ops.states",
        "LogState",
    }


def sources():
    """Modules of heinsen/ above the array functions and their kernels, without the kinds' own files."""
    own_files = {f"{MIXER_FILES}/{name}.py" for name in (*KINDS, "cached", "__init__")}
    for path in sorted((ROOT / "heinsen").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        are_functions = name.startswith(("heinsen/ops/", "heinsen/contrib/kernels/"))
        if not are_functions and name not in own_files | {"heinsen/__init__.py"}:
            yield pytest.param(path, id=name)


@pytest.mark.parametrize("path", list(sources()))
def test_no_kind_is_asked_for_outside_its_own_file(path):
    source = path.read_text()
    assert not questions(source) and not imported(source)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_kinds_do_not_know_each_other(kind):
    source = (ROOT / MIXER_FILES / f"{kind}.py").read_text()
    others = {f"{MIXER_FILES.replace('/', '.')}.{other}" for other in KINDS - {kind}}
    assert not imported(source) & others
    assert not any(other in question for question in questions(source) for other in KINDS - {kind})
