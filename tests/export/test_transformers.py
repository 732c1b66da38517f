"""Exports for transformers: their files, the way back, and (with torch) the same logits, losses, states and texts.

GPT-2's weights are imported from there.
"""

import json
from functools import partial, wraps

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

pytest_plugins = ["tests.run_fixtures"]

GATED = dict(forget_gate="head", output_gate=True, convolution=4, position="none")
MODELS = {
    "paper": dict(),
    "gated": GATED,
    "gated, documents": GATED | dict(document_token=256),
    "paper, documents": dict(document_token=256),
    "real values": dict(value_domain="real", output_gate=True),
    "gpt2's block": dict(block="gpt2", position="learned", n_positions=200, forget_gate="head"),
    "all options": dict(attention="heinsen*2", n_layers=4, output_gate=True, **{
        name: GATED[name] for name in ("forget_gate", "convolution")
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


@pytest.mark.parametrize("n_rows", [300, 100])
def test_a_vocabulary_that_transformers_resized_is_read_back(n_rows, tmp_path):
    config = model_config(vocab_size=min(257, n_rows), padded_vocab_size=n_rows)
    resized, settings = make_params(config, 0), tmp_path / "export" / "config.json"
    save(tmp_path / "export", config, resized)
    weights = (tmp_path / "export" / "model.safetensors").read_bytes()
    save(tmp_path / "export", model_config(), make_params(model_config(), 0), overwrite=True)
    (tmp_path / "export" / "model.safetensors").write_bytes(weights)
    fields = json.loads(settings.read_text()) | {"transformers_version": "5.0.0", "vocab_size": n_rows}
    settings.write_text(json.dumps(fields))
    found, _, loaded = load_folder(tmp_path / "export")
    assert found == config
    jax.tree.map(np.testing.assert_array_equal, loaded, resized)


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


LLAMA = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
LLAMA |= {piece: 259 + i for i, piece in enumerate(["▁", "h", "e", "l", "o", "▁h", "el", "▁hel"])}
TOKENIZERS = ["byte-level", "template", "llama"]


def save_tokenizer(folder, kind):
    """Export a model with a tokenizer's file of this kind, which adds to texts what our encoding leaves out."""
    tokenizers = pytest.importorskip("tokenizers")
    from tests.data.test_tokenizer_files import train_bpe

    folder.mkdir()
    library = tokenizers.Tokenizer.from_file(str(train_bpe(folder / "file.json", special=["<pad>", "<s>", "</s>"])))
    template = tokenizers.processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 2)])
    if kind == "llama":
        merges = [("▁", "h"), ("e", "l"), ("▁h", "el")]
        model = tokenizers.models.BPE(LLAMA, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
        library, normalizers, decoders = tokenizers.Tokenizer(model), tokenizers.normalizers, tokenizers.decoders
        library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        library.decoder = decoders.Sequence(steps)
        library.add_special_tokens(["<unk>", "<s>", "</s>"])
        template = tokenizers.processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", special_tokens=[("<s>", 1)])
    library.post_processor = tokenizers.processors.ByteLevel() if kind == "byte-level" else template
    library.enable_truncation(3)
    library.save(str(folder / "file.json"))
    ours, config = open_tokenizer_file(folder / "file.json", "</s>"), model_config()
    options = dict(step=0, run={}, card="", for_transformers=True, tokenizer_file=ours.content)
    save_folder(folder / "x", config, ours.name, make_params(config, 0), **options)
    return ours, folder / "x"


TEXTS = ("", " ", "hello  hel o!\n\n\tÄöü 東京 🙂 it's 12345\x00\x7f\u200d", "a" * 1000)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_an_exported_tokenizer_adds_nothing_and_the_file_comes_back(kind, tmp_path):
    ours, folder = save_tokenizer(tmp_path / "a", kind)
    theirs = pytest.importorskip("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert [theirs.encode(text).ids for text in TEXTS] == [ours.encode(text).tolist() for text in TEXTS]
    again = get_tokenizer(load_folder(folder)[1], folder)
    assert (again.name, again.content) == (ours.name, ours.content)
    (folder / "heinsen_tokenizer.json").replace(folder / "tokenizer.json")  # as exports were before
    assert get_tokenizer(ours.name, folder).content == ours.content


@pytest.mark.parametrize(("changes", "length"), [({}, int(1e30)), (dict(position="learned", n_positions=200), 200)])
def test_the_greatest_length_is_the_number_that_other_programs_compare_with(changes, length, tmp_path):
    config = model_config(**changes)
    save(tmp_path / "export", config, make_params(config, 0))
    settings = json.loads((tmp_path / "export" / "tokenizer_config.json").read_text())
    assert settings["model_max_length"] == length


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
def test_padding_anywhere_leaves_the_state_as_it_is(loaded, rng):
    """In pieces: left and right of texts and within them, pieces of nothing else, and rows that begin late."""
    import torch

    config, params, model = loaded
    tokens = torch.tensor(random_tokens(rng, config, (3, 160)))
    mask = torch.tensor(rng.random((3, 160)) < 0.7)
    mask[0, :80], mask[1, 20:110], mask[2, 70:] = False, False, False
    wanted = [model(row[is_token][None]).logits[0] for row, is_token in zip(tokens, mask, strict=True)]
    state, pieces, n_seen = None, [], 0
    for piece in tokens.split([40, 1, 29, 70, 20], dim=1):
        n_seen += piece.shape[1]
        columns = slice(0 if n_seen % 2 else n_seen - piece.shape[1], n_seen)  # of all tokens, or of the piece
        result = model(piece, past_key_values=state, attention_mask=mask[:, columns].long())
        state, pieces = result.past_key_values, [*pieces, result.logits]
    for row, is_token, want in zip(torch.cat(pieces, dim=1), mask, wanted, strict=True):
        torch.testing.assert_close(row[is_token], want, atol=1e-4, rtol=1e-5)
    torch.cat(pieces, dim=1)[mask].square().mean().backward()
    assert all(torch.isfinite(each.grad).all() and each.grad.any() for each in model.parameters())
    with pytest.raises(ValueError, match=r"attention_mask is \[3, 7\]: give \[3, 160\], 0 for padding"):
        model(tokens, attention_mask=mask[:, :7])


@pytest.mark.long
def test_arguments_of_forward(loaded, rng):
    import torch

    config, params, model = loaded
    tokens = torch.tensor(random_tokens(rng, config, (2, 90)))
    with torch.no_grad():
        whole = model(tokens, output_hidden_states=True)
        assert torch.equal(model(tokens, logits_to_keep=torch.tensor([3, 80])).logits, whole.logits[:, [3, 80]])
        assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(tokens)).logits, whole.logits)
        assert len(whole.hidden_states) == config.n_layers + 1
        assert torch.equal(whole.hidden_states[-1] @ model.embedding.weight.T, whole.logits)
        assert {x.shape for x in whole.hidden_states} == {(2, 90, config.d_model)}
    for arguments, message in (
        (dict(input_ids=tokens, output_attentions=True), "keeps no weights between tokens: leave output_attentions"),
        (dict(), "give one of input_ids and inputs_embeds"),
        (dict(input_ids=tokens[:, :0]), "no tokens to read: give at least one"),
    ):
        with pytest.raises(ValueError, match=message):
            model(**arguments)


@pytest.mark.long
def test_generation_reads_each_token_once(loaded, rng, monkeypatch):
    """From ids and from vectors, from the beginning and from a state."""
    import torch

    config, params, model = loaded
    tokens = torch.tensor(rng.integers(0, 256, (2, 30)))
    forward, lengths = type(model).forward, []
    vectors = model.embedding(tokens).detach()

    def count(self, input_ids=None, inputs_embeds=None, **arguments):
        lengths.append((inputs_embeds if input_ids is None else input_ids).shape[1])
        return forward(self, input_ids=input_ids, inputs_embeds=inputs_embeds, **arguments)

    result = model(tokens[:, :20])
    name = "cache" if "cache" in result else "past_key_values"  # of newer and of older versions of transformers
    after_20 = {name: result[name]}
    monkeypatch.setattr(type(model), "forward", wraps(forward)(count))
    options = dict(max_new_tokens=4, do_sample=False, eos_token_id=None)
    whole = model.generate(tokens, **options)
    assert lengths == [30, 1, 1, 1] and whole.shape == (2, 34)
    assert torch.equal(model.generate(inputs_embeds=vectors, **options), whole[:, 30:])
    assert torch.equal(model.generate(inputs_embeds=vectors, **after_20, **options), whole[:, 30:])
    assert torch.equal(model.generate(tokens, **after_20, **options), whole)
    assert lengths[4:] == [30, 1, 1, 1, 10, 1, 1, 1, 10, 1, 1, 1]
    hidden = model.generate(tokens, output_hidden_states=True, return_dict_in_generate=True, **options).hidden_states
    assert len(hidden) == 4 and len(hidden[0]) == config.n_layers + 1
    with pytest.raises(ValueError, match="the state has read 20 of 10 tokens: give those and the next ones"):
        model.generate(tokens[:, 20:], **after_20, **options)


@pytest.mark.long
def test_a_resized_vocabulary_is_saved_and_comes_back(loaded, transformers, tmp_path):
    import torch

    config, params, model = loaded
    tokens = torch.arange(20)[None]
    before = model(tokens).logits
    model.resize_token_embeddings(300)
    torch.testing.assert_close(model(tokens).logits[..., : config.padded_vocab_size], before)
    model.save_pretrained(tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", trust_remote_code=True)
    assert torch.equal(again(tokens).logits, model(tokens).logits) and again.config.vocab_size == 300
    found, _, loaded_params = load_folder(tmp_path / "again")
    assert (found.vocab_size, found.padded_vocab_size) == (257, 300)
    np.testing.assert_array_equal(loaded_params["embedding"], model.embedding.weight.detach())


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
@pytest.mark.parametrize("name", ["bytes", "gpt2", *TOKENIZERS])
def test_the_tokenizer_is_ours(transformers, tmp_path, name):
    if name in TOKENIZERS:
        ours, folder = save_tokenizer(tmp_path / "a", name)
    else:
        ours, config, folder = get_tokenizer(name), model_config(), tmp_path / "x"
        save_folder(folder, config, name, make_params(config, 0), step=0, run={}, card="", for_transformers=True)
    theirs = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    for text in TEXTS:
        assert theirs(text)["input_ids"] == ours.encode(text).tolist()
        assert theirs.decode(ours.encode(text)) == text
    assert theirs.eos_token_id == ours.eot_id and theirs.padding_side == "left"


@pytest.mark.long
@pytest.mark.parametrize(
    "changes", [dict(n_embd=24, n_head=3, n_layer=2, n_positions=40), dict(n_embd=64, n_head=1, n_layer=3), dict()]
)
def test_an_imported_gpt2_has_the_logits_of_transformers(changes, transformers, rng, commands, tmp_path):
    """The last is GPT-2 small. The weights' scales and biases are not as initialized."""
    import torch

    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**changes)).eval()
    with torch.no_grad():
        for x in theirs.parameters():
            x += torch.tensor(1.5 * rng.standard_normal(x.shape) / theirs.config.n_embd**0.5, dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "gpt2")
    end = commands.run("scripts/import_weights.py", f"--source={tmp_path}/gpt2", f"--out={tmp_path}/imported")
    assert end.returncode == 0, end.stderr
    config, tokenizer, params = load_folder(tmp_path / "imported")
    tokens = rng.integers(0, config.vocab_size, (2, 40))
    with torch.no_grad():
        want = theirs(torch.tensor(tokens)).logits
    assert want.std() > 1 and (tokenizer, config.padded_vocab_size) == ("gpt2", 50257)
    np.testing.assert_allclose(forward(config, params, tokens)[0], want, atol=1e-4)
