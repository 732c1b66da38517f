"""Exports for transformers: their files, the way back, and (with torch) the same logits, losses, states and texts."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import gated_125m, pile_125m
from heinsen.config import from_mapping
from heinsen.data.tokenizer import get_tokenizer, open_tokenizer_file
from heinsen.export import ExportError, is_export, load_folder, read_manifest, save_folder
from heinsen.models import ModelConfig, abstract_params, forward, init_params, mean_loss
from tests.model_configs import model_config

GATED = dict(gate="head", output_gate=True, convolution=4, position="none")
MODELS = {
    "paper": dict(),
    "gated": GATED,
    "gated, documents": GATED | dict(document_token=256),
    "paper, documents": dict(document_token=256),
    "real values": dict(value_domain="real", output_gate=True),
    "gpt2's block": dict(block="gpt2", position="learned", n_positions=200, gate="head"),
    "all options": dict(attention="heinsen*2", n_layers=4, output_gate=True, **{
        name: GATED[name] for name in ("gate", "convolution")
    }),
}  # fmt: skip


def make_params(config, seed):
    """Parameters of which none is as initialized: scales and biases start at 1 and 0."""
    rng = np.random.default_rng(seed)
    draw = lambda path, x: np.float32(0.3 * rng.normal(size=x.shape) + (path[-1].key.endswith("scale")))
    return jax.tree_util.tree_map_with_path(draw, abstract_params(config))


def save(folder, config, params, **options):
    options = dict(step=3, run={"seed": 1}, card="# A model", for_transformers=True) | options
    return save_folder(folder, config, "bytes", params, **options)


@pytest.fixture(params=MODELS)
def export(request, rng, tmp_path):
    """(config, parameters, folder) of a model with random weights."""
    config = model_config(**MODELS[request.param])
    params = make_params(config, int(rng.integers(2**31)))
    save(tmp_path / "export", config, params)
    return config, params, tmp_path / "export"


def test_a_folder_is_read_back(export):
    config, params, folder = export
    assert is_export(folder) and read_manifest(folder).layout == "huggingface"
    found, tokenizer, loaded = load_folder(folder)
    assert (found, tokenizer) == (config, "bytes")
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_damaged_weights_are_refused_unless_transformers_wrote_them(rng, tmp_path):
    config = model_config()
    save(tmp_path / "export", config, make_params(config, 0))
    path = tmp_path / "export" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-int(rng.integers(1, 1000))] ^= 1
    path.write_bytes(content)
    with pytest.raises(ExportError, match=r"model\.safetensors is damaged"):
        load_folder(tmp_path / "export")
    settings = tmp_path / "export" / "config.json"
    settings.write_text(
        json.dumps(json.loads(settings.read_text()) | {"transformers_version": "5.0.0"}, sort_keys=True)
    )
    load_folder(tmp_path / "export")


@pytest.mark.parametrize(
    "changes", [dict(attention="softmax"), dict(attention="heinsen,softmax"), dict(objective="masked")]
)
def test_other_models_are_refused(changes, tmp_path):
    config = model_config(**changes)
    with pytest.raises(ExportError, match="transformers gets models of heinsen attention .*without --format=hf"):
        save(tmp_path / "export", config, {})
    assert not list(tmp_path.iterdir())


def test_an_export_of_other_files_is_not_overwritten(tmp_path):
    config = model_config()
    params = make_params(config, 0)
    save(tmp_path / "export", config, params, for_transformers=False)
    with pytest.raises(ExportError, match="holds an export in another --format: use a new folder"):
        save(tmp_path / "export", config, params, overwrite=True)


def test_merges_of_long_tokens_follow_the_order_of_ids():
    from heinsen.export.huggingface import _merges

    assert _merges([b"a", b"b", b"c", b"bc", b"ab", b"abc", b"abcbc"])[2:] == [(b"a", b"bc"), (b"abc", b"bc")]


@pytest.mark.long
def test_merges_of_gpt2_are_those_of_its_file():
    from heinsen.export.huggingface import _tokenizer_json

    merges = _tokenizer_json(get_tokenizer("gpt2"))["model"]["merges"]
    assert len(merges) == 50_000
    assert merges[:4] == [["Ġ", "t"], ["Ġ", "a"], ["h", "e"], ["i", "n"]]  # the first lines of vocab.bpe
    assert merges[-1] == ["Ġg", "azed"]


# ---- with torch and transformers ------------------------------------------------------------------


@pytest.fixture(scope="module")
def transformers():
    pytest.importorskip("torch", reason="make transformers installs torch, which is large")
    return pytest.importorskip("transformers")


@pytest.fixture
def loaded(export, transformers):
    config, params, folder = export
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    return config, params, model.eval()


def random_tokens(rng, config, shape):
    """Tokens with documents of all lengths, one of them of none."""
    tokens = rng.integers(0, 256, shape)
    tokens[rng.random(shape) < 0.03] = 256
    tokens[:, 70:72] = 256
    return tokens


@pytest.mark.long
def test_logits_and_gradients_are_ours(loaded, rng):
    import torch

    config, params, model = loaded
    tokens = random_tokens(rng, config, (3, 150))
    ours, _ = forward(config, params, tokens)
    theirs = model(torch.tensor(tokens))
    np.testing.assert_allclose(theirs.logits.detach(), ours, atol=1e-4, rtol=1e-5)

    value, gradient = jax.value_and_grad(lambda params: mean_loss(config, params, tokens))(params)
    result = model(torch.tensor(tokens), labels=torch.tensor(tokens))
    result.loss.backward()
    assert abs(result.loss.item() - float(value)) < 1e-5
    np.testing.assert_allclose(model.embedding.weight.grad, gradient["embedding"], atol=1e-5)
    assert all(torch.isfinite(each.grad).all() and each.grad.any() for each in model.parameters())


@pytest.mark.long
@pytest.mark.parametrize("module", [pile_125m, gated_125m])
def test_logits_at_full_size_are_ours(module, transformers, rng, tmp_path):
    import torch

    config = from_mapping(ModelConfig, module.get_config().model.to_dict() | {"dtype": "float32"}, "model")
    params = init_params(config, jax.random.key(int(rng.integers(2**31))))
    save(tmp_path / "export", config, params)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export", trust_remote_code=True)
    tokens = rng.integers(0, config.vocab_size, (1, 200))
    with torch.no_grad():
        theirs = model(torch.tensor(tokens)).logits
    np.testing.assert_allclose(theirs, forward(config, params, tokens)[0], atol=1e-4)


@pytest.mark.long
def test_a_text_in_pieces_gives_the_same(loaded, rng):
    import torch

    config, params, model = loaded
    tokens = torch.tensor(random_tokens(rng, config, (2, 150)))
    with torch.no_grad():
        whole = model(tokens).logits
        state, pieces = None, []
        for piece in tokens.split([1, 100, 1, 1, 47], dim=1):
            result = model(piece, past_key_values=state, use_cache=True)
            state, pieces = result.past_key_values, [*pieces, result.logits]
    np.testing.assert_allclose(torch.cat(pieces, dim=1), whole, atol=1e-4, rtol=1e-5)
    assert state.get_seq_length() == 150


@pytest.mark.long
def test_generation_is_greedy_decoding_of_the_logits(loaded, rng):
    """From the state, of padded prompts too, and by beams: what reading the whole text again gives."""
    import torch

    config, params, model = loaded
    prompts = [rng.integers(0, 256, n) for n in (5, 70, 33)]
    padded = np.stack([np.pad(prompt, (70 - len(prompt), 0)) for prompt in prompts])
    mask = np.stack([np.arange(70) >= 70 - len(prompt) for prompt in prompts]).astype(int)
    options = dict(max_new_tokens=12, do_sample=False, eos_token_id=None)
    padded, mask = torch.tensor(padded), torch.tensor(mask)
    found = model.generate(padded, attention_mask=mask, **options)
    last_logits = jax.jit(partial(forward, config, last_only=True))
    for row, prompt in zip(found, prompts, strict=True):
        tokens = np.pad(prompt, (0, 82 - len(prompt)))
        for n in range(len(prompt), len(prompt) + 12):
            tokens[n] = jnp.argmax(last_logits(params, tokens[None], lengths=np.array([n]))[0][0, :257])
        np.testing.assert_array_equal(row[70 - len(prompt) :], tokens[: len(prompt) + 12])
    beams = [model.generate(padded, attention_mask=mask, num_beams=3, use_cache=cache, **options) for cache in (1, 0)]
    assert torch.equal(*beams)


@pytest.mark.long
def test_what_transformers_saves_comes_back(loaded, transformers, tmp_path):
    import torch

    config, params, model = loaded
    with torch.no_grad():
        model.norm.bias += 1.0
    model.save_pretrained(tmp_path / "again")
    found, tokenizer, again = load_folder(tmp_path / "again")
    assert (found, tokenizer) == (config, "bytes")
    params["norm"]["bias"] = params["norm"]["bias"] + 1
    jax.tree.map(np.testing.assert_array_equal, again, params)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "again", trust_remote_code=True, dtype="bfloat16"
    )
    assert model.dtype == torch.bfloat16 and torch.isfinite(model(torch.arange(40)[None]).logits).all()


@pytest.mark.long
@pytest.mark.parametrize("name", ["bytes", "gpt2", "file"])
def test_the_tokenizer_is_ours(transformers, tmp_path, name):
    if name == "file":
        from tests.data.test_tokenizer_files import train_bpe

        ours = open_tokenizer_file(train_bpe(tmp_path / "file.json", special=["<pad>", "</s>"]), "</s>")
    else:
        ours = get_tokenizer(name)
    config, options = model_config(), dict(step=0, run={}, card="", for_transformers=True, tokenizer_file=ours.content)
    save_folder(tmp_path / "x", config, ours.name, make_params(config, 0), **options)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "x", trust_remote_code=True)
    for text in ("", " ", "Hello  world!\n\n\tÄöü 東京 🙂 it's 12345\x00\x7f\u200d", "a" * 1000):
        assert theirs(text)["input_ids"] == ours.encode(text).tolist()
        assert theirs.decode(ours.encode(text)) == text
    assert theirs.eos_token_id == ours.eot_id and theirs.padding_side == "left"
