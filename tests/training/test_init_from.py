"""Parameters of a run start a model with additions: first at its outputs, then learning with the additions."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from heinsen.models import abstract_params, forward, mean_loss
from heinsen.models.additions import ADDITIONS, Addition
from heinsen.parallel import make_mesh
from heinsen.training.checkpoint import Checkpoints
from heinsen.training.folder import RunError, write_config
from heinsen.training.step import init_train_state
from heinsen.weights import load_initial_params
from tests.runs import run_config

pytest_plugins = ["tests.run_fixtures"]
pytestmark = pytest.mark.usefixtures("compile_cache")

# A value of each field with its addition. That of positions is one for these tests: a table of zeros does nothing.
WITH = {"position": "learned", "convolution": 4, "forget_gate": "head", "output_gate": True}
LEARNS_LATER = ("/gate/kernel", "/gate/bias")  # once the scale is not 0
TABLE = Addition("none", {"position/embedding": lambda config, shape: jnp.zeros(shape)})


@pytest.fixture
def table_is_optional(monkeypatch):
    monkeypatch.setitem(ADDITIONS, "position", TABLE)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A run without positions, whose parameters are those it began with."""
    workdir = tmp_path_factory.mktemp("source") / "run"
    config = run_config(Path("data"), model__position="none", model__n_positions=32)
    write_config(config, workdir, "bytes")
    state = init_train_state(config.model, optax.sgd(0.1), 1, make_mesh())
    with Checkpoints(workdir, 1) as checkpoints:
        checkpoints.save(2, state, {}, config.fingerprint)
    return workdir


def started_config(source: Path, **changes):
    changes = {"model__position": "none", "model__n_positions": 32} | changes
    return run_config(Path("data"), init_from=str(source), **changes)


@pytest.mark.parametrize(
    "addition",
    [
        "forget_gate",
        *(
            pytest.param(addition, marks=pytest.mark.long)
            for addition in sorted({"position", *ADDITIONS} - {"forget_gate"})
        ),
    ],
)
def test_a_model_with_an_addition_starts_as_its_source_and_learns(addition, source, table_is_optional, rng):
    before, after = started_config(source), started_config(source, **{f"model__{addition}": WITH[addition]})
    tokens, mesh = jnp.asarray(rng.integers(0, 257, (3, 9)), jnp.int32), make_mesh()
    (_, params), (step, started) = (load_initial_params(config, mesh, "bytes") for config in (before, after))
    assert step == 2 and len(jax.tree.leaves(started)) > len(jax.tree.leaves(params))
    apply = jax.jit(forward, static_argnums=0)
    want = apply(before.model, params, tokens[:, :-1])[0]
    got = apply(after.model, started, tokens[:, :-1])[0]
    # Decays of 0 take another path through the attention, whose rounding differs.
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 if addition == "forget_gate" else 0)

    gradients = jax.jit(jax.grad(lambda params: mean_loss(after.model, params, tokens)))(started)
    abstract = abstract_params(after.model)
    assert jax.tree.structure(started) == jax.tree.structure(abstract)
    assert jax.tree.map(jnp.shape, started) == jax.tree.map(jnp.shape, abstract)
    ends = [*ADDITIONS[addition].identity]
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if any(map(name.endswith, ends)) and not name.endswith(LEARNS_LATER):
            assert np.abs(gradient).max() > 0, f"{name} does not learn"


def test_what_no_part_explains_is_refused(source, table_is_optional, monkeypatch):
    cases = [
        ({"model__position": "learned", "model__n_layers": 3}, "model.n_layers: 2 in the run, 3 in the command"),
        ({"model__n_layers": 3}, "model.n_layers: 2 in the run, 3 in the command"),
        # The field is that of an addition, the parameters are not: positions of another kind.
        (
            {"model__position": "recurrent"},
            r"cannot start this model: the tensors do not fit the model:\n  missing: position.dense.bias, position",
        ),
    ]
    for changes, message in cases:
        with pytest.raises(RunError, match=message):
            load_initial_params(started_config(source, **changes), make_mesh(), "bytes")
    with pytest.raises(RunError, match="of a model of 'bytes' tokens, the data of data has 'gpt2' tokens: use other"):
        load_initial_params(started_config(source), make_mesh(), "gpt2")
    monkeypatch.delitem(ADDITIONS, "position")
    with pytest.raises(RunError, match="model.position: 'none' in the run, 'learned' in the command"):
        load_initial_params(started_config(source, model__position="learned"), make_mesh(), "bytes")


def test_a_source_with_an_addition_does_not_start_a_model_without_it(table_is_optional, tmp_path):
    write_config(run_config(Path("data")), tmp_path, "bytes")
    with pytest.raises(RunError, match="model.position: 'recurrent' in the run, 'none' in the command"):
        load_initial_params(started_config(tmp_path, model__n_positions=None), make_mesh(), "bytes")
