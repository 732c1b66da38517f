"""One decoding step in ONNX, by its runtime and by its reference evaluator, against `forward` of whole texts."""

import dataclasses
import json
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from scipy.special import logsumexp

from heinsen.contrib.onnx import check_exportable, save_step, state_shapes, to_step_state
from heinsen.data.tokenizer import get_tokenizer
from heinsen.decoding import Prefix, load_prefix, save_prefix
from heinsen.export import ExportError
from heinsen.models import abstract_params, forward, init_model_state
from heinsen.ops.running import from_running, take_step, to_running
from heinsen.ops.states import init_state
from tests.export.test_transformers import save_tokenizer
from tests.model_configs import model_config

onnx = pytest.importorskip("onnx", reason="pip install onnx onnxruntime")
onnxruntime = pytest.importorskip("onnxruntime", reason="pip install onnx onnxruntime")

DOCUMENT = 256
GATED = dict(forget_gate="head", output_gate=True, convolution=4, position="none")
MODELS = {
    "paper": dict(),
    "gated": GATED,
    "gated, documents": GATED | dict(document_token=DOCUMENT),
    "real values": dict(value_domain="real", output_gate=True, document_token=DOCUMENT),
    "real values, gated": dict(value_domain="real", **GATED),
    "gpt2's block": dict(block="gpt2", position="learned", n_positions=60, forget_gate="head", document_token=DOCUMENT),
}
# Their parts are among those of the others.
COVERED = ("gated", "real values, gated")
models = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in COVERED)) for name in MODELS]
)
FAST = dict(implementation="reference")  # to trace
TOKENIZER = get_tokenizer("bytes")


def make_params(config, rng):
    """Parameters of which none is as initialized: scales start at 1, biases at 0. Some gates' scales are below 0."""

    def draw(path, x):
        names = [key.key for key in path]
        is_gate, is_scale = names[-2:] == ["gate", "scale"], names[-1] == "scale"
        return np.float32((1.0 if is_gate else 0.3) * rng.normal(size=x.shape) + (is_scale and not is_gate))

    return jax.tree_util.tree_map_with_path(draw, abstract_params(config))


def random_tokens(rng, shape):
    """Ids of bytes, and now and then one that begins a document."""
    return np.where(rng.random(shape) < 0.05, DOCUMENT, rng.integers(0, 256, shape)).astype(np.int32)


def empty_state(config, batch_size):
    """The state before any token, which is zeros."""
    state = to_step_state(config, init_model_state(config, batch_size))
    assert {name: x.shape[1:] for name, x in state.items()} == state_shapes(config) and not any(
        map(np.any, state.values())
    )
    return state


def session(path):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options)


def steps(run, names, tokens, state):
    """Return the logits [B, T, vocab] of tokens [B, T] read one by one, and the state after them."""
    found = []
    for each in np.ascontiguousarray(tokens.T):  # as the evaluator of onnx 1.17 needs them
        logits, *after = run(["logits", *(f"new.{name}" for name in names)], {"tokens": each, **state})
        found.append(logits)
        state = dict(zip(names, after, strict=True))
    return np.stack(found, axis=1), state


def export(folder, changes, rng, **options):
    """(config, parameters, session, names of the state) of a model with random weights, saved in the folder."""
    config = model_config(**FAST, **changes)
    params = make_params(config, rng)
    save_step(folder, config, TOKENIZER, params, step=7, **options)
    return config, params, session(folder / "model.onnx"), list(state_shapes(config))


def logits_and_state(config, params, tokens, state=None):
    return jax.jit(forward, static_argnums=0)(config, params, tokens, state)


@models
def test_steps_give_the_logits_of_the_whole_text(name, rng, tmp_path):
    config, params, model, names = export(tmp_path, MODELS[name], rng)
    tokens = random_tokens(rng, (2, 50))
    got, _ = steps(model.run, names, tokens, empty_state(config, 2))
    np.testing.assert_allclose(got, logits_and_state(config, params, tokens)[0][..., :257], atol=1e-4, rtol=0)


@pytest.mark.long
@pytest.mark.parametrize("name", ["paper", "gated", "real values"])
def test_a_thousand_steps(name, rng, tmp_path):
    config, params, model, names = export(tmp_path, MODELS[name], rng)
    tokens = random_tokens(rng, (1, 1000))
    got, _ = steps(model.run, names, tokens, empty_state(config, 1))
    np.testing.assert_allclose(got, logits_and_state(config, params, tokens)[0][..., :257], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["paper", "gated, documents", "real values"])
def test_the_reference_evaluator_agrees(name, rng, tmp_path):
    from onnx.reference import ReferenceEvaluator

    config, params, _, names = export(tmp_path, MODELS[name], rng)
    tokens = random_tokens(rng, (2, 4))
    with np.errstate(divide="ignore"):  # log 0 of an empty sum
        got, _ = steps(ReferenceEvaluator(str(tmp_path / "model.onnx")).run, names, tokens, empty_state(config, 2))
    np.testing.assert_allclose(got, logits_and_state(config, params, tokens)[0][..., :257], atol=1e-4, rtol=0)


@models
def test_a_saved_state_goes_on(name, rng, tmp_path):
    """Within reach of a convolution from the beginning of a document, and without one."""
    config = model_config(**FAST, **MODELS[name])
    params, tokens = make_params(config, rng), rng.integers(0, 256, (1, 40)).astype(np.int32)
    tokens[0, 28] = DOCUMENT
    logits, state = logits_and_state(config, params, tokens[:, :30])
    save_prefix(tmp_path / "saved", config, params, Prefix(logits[:, -1], state))
    prefix = load_prefix(tmp_path / "saved", config, params)
    save_step(tmp_path / "model", config, TOKENIZER, params, step=0, prefix=prefix)
    saved = load_file(tmp_path / "model" / "state.safetensors")
    np.testing.assert_array_equal(saved.pop("logits"), logits[:, -1, :257])
    got, _ = steps(session(tmp_path / "model" / "model.onnx").run, list(state_shapes(config)), tokens[:, 30:], saved)
    want = logits_and_state(config, params, tokens)[0][:, 30:, :257]
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("domain, spread", [("log", 100.0), ("log", 1.0), ("real", 1.0)])
def test_exponents_of_any_size_lose_nothing(domain, spread, rng, tmp_path):
    """The attention of a layer against sums over all tokens in float64, where running averages underflow."""
    config = model_config(value_domain=domain, n_layers=1, position="none", forget_gate="head")
    params = make_params(config, rng)
    layer = params["layers"]
    factors = np.tile(np.repeat(np.float32([1000, 1000, spread]), 4), 2)  # of q, k and values, head by head
    layer["w1"] = jax.tree.map(lambda x: factors * x, layer["w1"])
    layer["gate"] = {"kernel": 0 * layer["gate"]["kernel"], "bias": np.float32([[12, 1]]), "scale": np.ones((1, 2))}
    save_step(tmp_path / "model", config, TOKENIZER, params, step=0)
    q, k, values, log_decay, y = run_attention(tmp_path / "model" / "model.onnx", config, rng)
    np.testing.assert_allclose(log_decay[0, :, 0], -np.log1p(np.exp([-12, -1])), rtol=1e-6)
    assert np.abs(k).max() > 1000
    if domain == "log" and spread > 1:
        running = to_running(init_state((2, 2), 4, 4))
        for each in zip(*(np.moveaxis(x, 2, 0) for x in (q, k, values, log_decay)), strict=True):
            _, running = jax.jit(take_step)(running, *each)
        assert not from_running(running)[1].all()
    q, k, values, total = (np.asarray(x, np.float64) for x in (q, k, values, log_decay))
    total = np.cumsum(total, axis=2)
    scores = logsumexp(q[:, :, :, None] + k[:, :, None], axis=-1) + total[..., :, None] - total[..., None, :]
    scores = np.where(np.tri(q.shape[2], dtype=bool), scores, -np.inf)
    log_weights = (scores - logsumexp(scores, axis=-1, keepdims=True))[..., None]
    if domain == "log":
        want = logsumexp(log_weights + values[:, :, None], axis=3)
    else:
        want = np.sum(np.exp(log_weights) * values[:, :, None], axis=3)
    np.testing.assert_allclose(y, want, rtol=1e-6, atol=3e-6 * np.abs(values).max())


def run_attention(path, config, rng):
    """Return q, k, values, log decays and outputs [B, H, T, ...] of the only layer while it reads random tokens."""
    graph = onnx.load(path)
    find = lambda kind: [node for node in graph.graph.node if node.op_type == kind]
    (decay,) = (node.output[0] for node in find("Mul") if "layer_0.gate.scale" in node.input)
    inner = [*find("Split")[0].output, decay, find("Reshape")[1].input[0]]
    graph.graph.output.extend(onnx.ValueInfoProto(name=name) for name in inner)
    model, names = session(graph.SerializeToString()), list(state_shapes(config))
    state, found = empty_state(config, 2), []
    for token in random_tokens(rng, (200, 2)):
        _, *after = model.run(None, {"tokens": token, **state})
        state = dict(zip(names, after[: len(names)], strict=True))
        found.append(after[len(names) :])
    return [np.stack(x, axis=2) for x in zip(*found, strict=True)]


# ---- folders ---------------------------------------------------------------------------------------


def test_the_folder_says_what_it_holds(rng, tmp_path):
    config, _, model, names = export(tmp_path / "a", MODELS["gated"], rng)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["model.json", "model.onnx"]
    record = json.loads((tmp_path / "a" / "model.json").read_text())
    assert record["config"] == dataclasses.asdict(config) and record["tokenizer"] == "bytes" and record["step"] == 7
    inputs = {each.name: each for each in model.get_inputs()}
    assert list(inputs) == ["tokens", *names] == ["tokens", *record["state"]]
    for name, facts in record["state"].items():
        assert inputs[name].shape == ["B", *facts["shape"]] and facts["dtype"] == "float32"
    metadata = model.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["config"]) == record["config"]
    assert (metadata["tokenizer"], metadata["step"]) == ("bytes", "7")
    (opset,) = onnx.load(tmp_path / "a" / "model.onnx").opset_import
    assert opset.domain == "" and opset.version <= 21


def test_a_tokenizer_that_is_a_file_adds_nothing_to_a_text(rng, tmp_path):
    (ours, _), config = save_tokenizer(tmp_path / "a", "template"), model_config(**FAST)
    save_step(tmp_path / "b", config, ours, make_params(config, rng), step=0)
    theirs = pytest.importorskip("tokenizers").Tokenizer.from_file(str(tmp_path / "b" / "tokenizer.json"))
    assert theirs.encode("a text").ids == ours.encode("a text").tolist()


def test_only_an_earlier_export_is_replaced(rng, tmp_path):
    config = model_config(**FAST)
    params = make_params(config, rng)
    logits, state = logits_and_state(config, params, random_tokens(rng, (1, 5)))
    prefix = Prefix(logits[:, -1], state)
    save_step(tmp_path / "a", config, TOKENIZER, params, step=0, prefix=prefix)
    with pytest.raises(ExportError, match="use a new folder, or --overwrite"):
        save_step(tmp_path / "a", config, TOKENIZER, params, step=1)
    save_step(tmp_path / "a", config, TOKENIZER, params, step=1, overwrite=True)
    assert not (tmp_path / "a" / "state.safetensors").exists(), "that of other weights"
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ExportError, match="holds something else: use a new folder"):
        save_step(tmp_path, config, TOKENIZER, params, step=1, overwrite=True)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(attention="softmax"), "model.attention = 'softmax': .*train a model with attention = heinsen"),
        (dict(attention="heinsen,linear"), "model.attention = 'heinsen,linear'.*without --format=onnx"),
        (dict(objective="masked"), "model.objective = 'masked'.*needs next_token; .*objective = next_token"),
    ],
)
def test_other_models_are_refused(changes, message, tmp_path):
    config = model_config(**changes)
    with pytest.raises(ExportError, match=message):
        check_exportable(config)
    with pytest.raises(ExportError, match=message):
        save_step(tmp_path / "a", config, TOKENIZER, {}, step=0)
    assert not list(tmp_path.iterdir())


def test_a_model_beyond_the_file_format_is_refused(tmp_path):
    config = model_config(d_model=2**13, vocab_size=70_000, padded_vocab_size=70_000)
    with pytest.raises(ExportError, match=r"parameters in float32 exceed the 2 GiB of an ONNX file"):
        save_step(tmp_path / "a", config, TOKENIZER, abstract_params(config), step=0)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ExportError, match="pip install 'onnx>=1.17'"):
        check_exportable(model_config())
