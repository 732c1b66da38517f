"""GPT-2's weights in transformers' format: an import gives GPT-2's logits in float64, and what does not fit is named.

tests/export/test_transformers.py compares with transformers itself.
"""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import default, gpt2_124m
from heinsen.config import from_mapping
from heinsen.export import ExportError
from heinsen.export.gpt2 import load_gpt2, read_gpt2_config
from heinsen.models import ModelConfig, count_params, forward
from heinsen.parallel import make_mesh
from heinsen.training.config import TrainConfig
from heinsen.training.folder import load_run, load_tokenizer_name
from heinsen.weights import load_initial_params, load_params
from tests.export.gpt2 import CONFIG, N_IDS, draw_weights, logits64, write_source

pytest_plugins = ["tests.run_fixtures"]
pytestmark = pytest.mark.usefixtures("compile_cache")

SMALL = CONFIG | dict(n_embd=12, n_head=3, n_layer=2, n_positions=16)


def as_hub(config, weights):
    """As on the hub: no prefix, no head, and the masks of old versions."""
    n, layers = config["n_positions"], range(config["n_layer"])
    masks = {f"h.{i}.attn.bias": np.tril(np.ones((1, 1, n, n), np.float32)) for i in layers}
    return weights | masks | {f"h.{i}.attn.masked_bias": np.float32([-1e4]) for i in layers}


def as_module(config, weights):
    """As transformers names them, with the head."""
    return {f"transformer.{name}": x for name, x in weights.items()} | {"lm_head.weight": weights["wte.weight"]}


def as_head_alone(config, weights):
    """The embedding under the name of the head, as a file without tensors that occur twice may have it."""
    return {name: x for name, x in as_module(config, weights).items() if name != "transformer.wte.weight"}


@pytest.fixture
def imported(commands, tmp_path):
    """Return a function that imports a folder of these fields and tensors, and returns the folder that it wrote."""

    def run(config, weights):
        source, out = write_source(tmp_path / "source", config, weights), tmp_path / "imported"
        end = commands.fork("scripts/import_weights.py", f"--source={source}", f"--out={out}")
        assert end.returncode == 0 and re.match(f"{out}: [0-9,]+ parameters of {source}, GPT-2", end.stdout), end.stderr
        return out

    return run


@pytest.mark.parametrize(
    ("write", "changes"),
    [
        (as_hub, {}),
        (as_module, dict(n_embd=20, n_head=2, n_layer=3, n_positions=11, activation_function="gelu_pytorch_tanh")),
        (as_head_alone, dict(n_head=1, n_layer=1, vocab_size=N_IDS + 7, n_inner=48)),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_an_import_has_the_logits_of_gpt2(write, changes, rng, imported):
    config = SMALL | changes
    weights = draw_weights(rng, config)
    folder = imported(config, write(config, weights))
    run = load_run(folder)
    assert (
        load_tokenizer_name(folder) == "gpt2" and run.sequence_length == run.model.n_positions == config["n_positions"]
    )
    assert (run.model.vocab_size, run.model.padded_vocab_size) == (N_IDS, config["vocab_size"])
    step, params = load_params(folder, run.model, make_mesh())
    tokens = rng.integers(N_IDS, size=(2, config["n_positions"]))
    logits, state = jax.jit(forward, static_argnums=0)(run.model, params, tokens)
    want = np.stack([logits64(config, weights, row) for row in tokens])
    assert np.std(want) > 1
    np.testing.assert_allclose(logits, want, atol=1e-4)
    assert step == 0 and count_params(params) == sum(x.size for x in weights.values())
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}


def test_a_run_of_the_config_of_gpt2_starts_from_an_import(rng, imported, tmp_path):
    fields = gpt2_124m.get_config().to_dict()
    source = tmp_path / "gpt2"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(CONFIG))
    named = {name: fields["model"][name] for name in read_gpt2_config(source)}
    assert named == read_gpt2_config(source)
    weights = draw_weights(rng, SMALL)
    folder = imported(SMALL, weights)
    small = dict(n_layers=2, d_model=12, n_heads=3, d_key=4, d_value=4, n_positions=16, convolution=4)
    fields |= {"model": fields["model"] | small, "sequence_length": 16, "init_from": str(folder)}
    config = from_mapping(TrainConfig, fields)
    params = load_initial_params(config, make_mesh(), "gpt2").params
    np.testing.assert_array_equal(params["embedding"], weights["wte.weight"])
    assert params["layers"]["convolution"]["taps"].shape == (2, 3, 4, 12)


BAD_CONFIGS = [
    (dict(model_type="llama"), "model_type = 'llama': only models of transformers with 'gpt2' can be imported"),
    (dict(activation_function="relu"), "activation_function = 'relu': only models with 'gelu_new' can be imported"),
    (dict(layer_norm_epsilon=1e-6), "layer_norm_epsilon = 1e-06: only models with 1e-05 can be imported"),
    (dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx = True: only models with False"),
    (dict(n_inner=30), "n_inner = 30: only models with 4 n_embd = 48 can be imported"),
    (dict(n_head=5), "n_embd = 12 does not divide into n_head = 5 heads"),
    (dict(n_layer="2"), "n_layer = '2': expected a number above 0"),
    (dict(vocab_size=32000), "vocab_size = 32000: only models of GPT-2's 50257 tokens can be imported"),
]


def without(weights, name):
    return {other: x for other, x in weights.items() if other != name}


BAD_WEIGHTS = {
    "\n  missing: h.1.ln_2.bias": lambda w: without(w, "h.1.ln_2.bias"),
    "\n  unknown: score.weight": lambda w: w | {"score.weight": np.zeros((2, 12), np.float32)},
    "\n  h.0.mlp.c_fc.weight is [48, 12], not [12, 48]": lambda w: w | {
        "h.0.mlp.c_fc.weight": w["h.0.mlp.c_fc.weight"].T.copy()},
    "\n  ln_f.bias is int32, not a floating-point type": lambda w: w | {"ln_f.bias": np.zeros(12, np.int32)},
    "lm_head.weight is not wte.weight: only models with a tied head can be imported": lambda w: w | {
        "lm_head.weight": 2 * w["wte.weight"]},
}  # fmt: skip


@pytest.fixture
def read(rng, tmp_path):
    """Return a function that reads a folder of weights for SMALL with these changes."""
    weights = draw_weights(rng, SMALL)

    def read(changes=None, change=lambda weights: weights, damage=lambda folder: None):
        folder = write_source(tmp_path / "source", SMALL | (changes or {}), change(weights))
        damage(folder)
        load_gpt2(folder, from_mapping(ModelConfig, default.get_config().model.to_dict() | read_gpt2_config(folder)))

    return read


@pytest.mark.parametrize(("changes", "message"), BAD_CONFIGS)
def test_other_models_are_refused_with_the_field(changes, message, read, tmp_path):
    with pytest.raises(ExportError, match=re.escape(f"{tmp_path}/source/config.json: {message}")):
        read(changes)


@pytest.mark.parametrize("message", BAD_WEIGHTS)
def test_tensors_that_do_not_fit_are_named(message, read, tmp_path):
    with pytest.raises(ExportError, match=f"^{tmp_path}/source/model.safetensors: .*{re.escape(message)}$"):
        read(change=BAD_WEIGHTS[message])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is damaged .*: download it with"),
        (
            lambda folder: (folder / "config.json").unlink(),
            "config.json cannot be read .No such file.*: download it with",
        ),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"12"),
            "model.safetensors cannot be read .*: download it",
        ),
        (
            lambda folder: (folder / "model.safetensors").unlink(),
            "cannot be read .No such file.*to be saved as one: save_pretr",
        ),
    ],
)
def test_files_that_cannot_be_read_are_named(damage, message, read):
    with pytest.raises(ExportError, match=message):
        read(damage=damage)


def test_the_command_ends_with_the_message_and_writes_nothing(rng, commands, tmp_path):
    source = write_source(tmp_path / "source", SMALL | dict(n_head=2, n_layer=1), draw_weights(rng, SMALL))
    end = commands.run("scripts/import_weights.py", f"--source={source}", f"--out={tmp_path}/new")
    message = f"error: {source}/model.safetensors: the tensors do not fit the model:\n  unknown: h.1.attn.c_attn.bias, "
    assert end.returncode == 1 and end.stderr.startswith(message) and len(end.stderr.splitlines()) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
