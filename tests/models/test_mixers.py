"""The mixer interface: one more kind by one class and one registration; and nobody asks which kind it has."""

import ast
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen.config import ConfigError
from heinsen.decoding import Sampling, generate, load_prefix, prefill, prompts, save_prefix
from heinsen.models import forward, init_model_state, init_params, mean_loss
from heinsen.models.config import BLOCKS, POSITIONS
from heinsen.models.language_model import LAYERS
from heinsen.models.mixers import MIXERS, Mixer
from heinsen.models.positions import POSITION_CLASSES
from heinsen.models.state import capacity, locate_tokens
from tests.model_configs import model_config

pytest_plugins = ["tests.run_fixtures"]
pytestmark = pytest.mark.usefixtures("compile_cache")

# ---- one more kind -------------------------------------------------------------------------------

DECAY = 0.8


@dataclasses.dataclass(frozen=True)
class MovingAverage(Mixer[jax.Array]):
    """y[t] = m[t] = DECAY m[t-1] + (1 - DECAY) v[t], from m = 0. The state is m, [B, H, V]."""

    def init_state(self, batch_size, capacity):
        return jnp.zeros((batch_size, self.n_heads, self.d_value), self.accumulator_dtype)

    def _attend(self, q, k, values, state, tokens):
        n_batch, _, n_tokens, _ = values.shape
        begins = jnp.zeros((n_batch, n_tokens), bool)
        if tokens.segment_ids is not None:
            begins = begins.at[:, 1:].set(jnp.diff(tokens.segment_ids[:, 0], axis=-1) != 0)
        valid = jnp.ones_like(begins) if tokens.valid is None else tokens.valid

        def token(m, at_t):
            v, begins, valid = at_t
            new = DECAY * jnp.where(begins[:, None, None], 0, m) + (1 - DECAY) * v
            m = jnp.where(valid[:, None, None], new, m)
            return m, m

        state = self.init_state(n_batch, 0) if state is None else state
        state, y = jax.lax.scan(token, state, (jnp.moveaxis(values, 2, 0), begins.T, valid.T))
        return jnp.moveaxis(y, 0, 2), state


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setitem(MIXERS, "moving_average", MovingAverage.from_config)


@pytest.fixture(params=["moving_average", pytest.param("heinsen,moving_average", marks=pytest.mark.long)])
def config(request, registered):
    n_layers = 1 + request.param.count(",")
    return model_config(attention=request.param, n_layers=n_layers, document_token=5, implementation="reference")


@pytest.fixture
def params(config, rng):
    """Fresh parameters, with an embedding large enough to decide between tokens."""
    params = jax.jit(init_params, static_argnums=0)(config, jax.random.key(int(rng.integers(2**31))))
    return params | {"embedding": 10 * params["embedding"]}


@pytest.fixture
def tokens(rng):
    tokens = rng.integers(6, 257, (2, 24))
    tokens[0, [0, 9]] = tokens[1, 16] = 5
    return np.int32(tokens)


full_forward = jax.jit(forward, static_argnums=0)


def test_it_is_known_while_it_is_registered(config):
    assert isinstance(config.mixers[-1], MovingAverage) and not config.has_cache and not config.splits_sequences
    assert init_model_state(config, 2).attention[-1].shape == (2, 2, 4)


def test_without_registration_it_is_no_kind():
    assert "moving_average" not in MIXERS
    with pytest.raises(ConfigError, match="'moving_average' is no kind of attention; choose heinsen, softmax,"):
        model_config(attention="moving_average")


def test_it_computes_its_equation(registered, rng):
    config = model_config(attention="moving_average")
    values, m = np.float32(rng.standard_normal((2, 2, 6, 4))), np.zeros((2, 2, 4))
    qkv = 3 * [jnp.asarray(values)]
    _, context = locate_tokens(config, jnp.zeros((2, 6), jnp.int32))
    y, _ = config.mixers[0].attend(*qkv, None, context, None)
    for t in range(6):
        m = DECAY * m + (1 - DECAY) * values[:, :, t]
        np.testing.assert_allclose(y[:, :, t], m, atol=1e-6)


def test_it_trains(config, params, rng):
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


def test_pieces_and_ragged_prompts_equal_the_forward_pass(config, params, tokens, monkeypatch):
    expected, _ = full_forward(config, params, tokens)
    assert np.std(expected) > 0.5
    monkeypatch.setattr(prompts, "PREFILL_PIECE", 8)
    lengths = np.array([13, 22])
    logits, state = prefill(config, params, tokens[:, :22], lengths=lengths)
    np.testing.assert_allclose(logits, expected[[0, 1], lengths - 1], atol=1e-4)
    logits, _ = prefill(config, params, tokens[:1, 13:], jax.tree.map(lambda x: x[:1], state))
    np.testing.assert_allclose(logits[0], expected[0, -1], atol=1e-4)
    without = dataclasses.replace(config, document_token=None)
    assert np.abs(full_forward(without, params, tokens)[0] - expected).max() > 1e-2, "documents matter"


def test_it_decodes_what_the_forward_pass_finds_likeliest(config, params, tokens):
    written = list(generate(config, params, tokens[0, :11], Sampling(temperature=0.0), seed=0, max_tokens=12))
    text = np.array([*tokens[0, :11], *written])
    logits, _ = full_forward(config, params, text[None])
    np.testing.assert_array_equal(np.argmax(logits[0, 10:-1, :257], axis=-1), written)


def test_its_state_is_saved_and_restored(config, params, tokens, tmp_path):
    prefix = prefill(config, params, tokens[:, :9])
    assert capacity(config, prefix.state) is None
    save_prefix(tmp_path / "state", config, params, prefix)
    jax.tree.map(np.testing.assert_array_equal, load_prefix(tmp_path / "state", config, params), prefix)


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
