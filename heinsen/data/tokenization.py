"""Batches of raw documents to tokens, in order, by worker processes."""

import collections
import concurrent.futures
import concurrent.futures.process
import functools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from heinsen.data.readers import READERS, BadDocumentError, Content, PreparationError, Row, Settings
from heinsen.data.shards import token_dtype
from heinsen.data.sources import InputBlock, InputPosition
from heinsen.data.tokenizer import get_tokenizer

BATCH_BYTES = 2 << 20  # of raw documents sent to a worker at a time


class TokenizedDocument(NamedTuple):
    """The tokens of a document, or the reason why it has none.

    Attributes:
      position: of the document in the inputs.
      tokens: `token_dtype` `[n_tokens]`, the end-of-text token included.
      n_bytes: UTF-8 bytes of the text.
      n_lost: those of them that the tokens do not stand for.
      source: name of the document's source; None if it names none.
      problem: what is wrong with the document, else None.
    """

    position: InputPosition
    tokens: np.ndarray
    n_bytes: int
    n_lost: int
    source: str | None
    problem: str | None = None


# Of a batch, in place of many small arrays: the tokens of all documents; and for each document its input, its number
# there, its tokens, bytes, lost bytes, source and problem.
_Document = tuple[int, int, int, int, int, str | None, str | None]
_Tokenized = tuple[np.ndarray, list[_Document]]


def tokenize_blocks(
    blocks: Iterator[InputBlock], settings: Settings, folder: Path, workers: int
) -> Generator[TokenizedDocument, None, None]:
    """Yield the documents of the blocks in order, tokenized ahead by `workers` processes; 1 uses this process.

    folder: the one that holds the tokenizer's file, if it is a file.

    Closing the generator ends the workers. Raises PreparationError if one of them dies.
    """
    work = functools.partial(_tokenize_batch, settings, folder)
    if workers == 1:
        for batch in _batch(blocks):
            yield from _divide(work(batch))
        return
    # Spawned, not forked: the caller may have threads.
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, context, initializer=_start_worker)
    queue: collections.deque[concurrent.futures.Future[_Tokenized]] = collections.deque()
    try:
        for batch in _batch(blocks):
            queue.append(pool.submit(work, batch))
            if len(queue) > 2 * workers:  # bounds memory, and keeps workers busy while results are written
                yield from _divide(queue.popleft().result())
        while queue:
            yield from _divide(queue.popleft().result())
    except concurrent.futures.process.BrokenProcessPool as error:
        raise PreparationError(
            "a worker process died, perhaps for lack of memory. Finished shards are kept: rerun the same command to "
            "resume, with fewer --workers if memory was the reason"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _batch(blocks: Iterator[InputBlock]) -> Iterator[list[InputBlock]]:
    batch: list[InputBlock] = []
    size = 0
    for each in blocks:
        batch.append(each)
        text = each.content.text if isinstance(each.content, Row) else each.content
        size += len(text) if isinstance(text, bytes | str) else 1
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _divide(tokenized: _Tokenized) -> Iterator[TokenizedDocument]:
    tokens, documents = tokenized
    start = 0
    for index, number, n_tokens, n_bytes, n_lost, source, problem in documents:
        own = tokens[start : start + n_tokens]
        yield TokenizedDocument(InputPosition(index, number), own, n_bytes, n_lost, source, problem)
        start += n_tokens


# In the workers.


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent ends the workers
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow_parent() -> None:
        parent.join()
        os._exit(1)

    # A killed parent cannot end its workers, which would wait for the next batch forever.
    threading.Thread(target=follow_parent, daemon=True).start()


_get_tokenizer_once = functools.cache(get_tokenizer)


def _tokenize_batch(settings: Settings, folder: Path, batch: list[InputBlock]) -> _Tokenized:
    tokenizer = _get_tokenizer_once(settings.tokenizer, folder)
    pieces = [np.empty(0, token_dtype(tokenizer.vocab_size))]
    documents: list[_Document] = []
    for index, kind, numbers, block in batch:
        for number, content in READERS[kind].split(numbers, block):
            try:
                text, source = _parse(kind, content, settings)
                n_bytes = len(text.encode())
            except (BadDocumentError, UnicodeEncodeError) as error:
                documents.append((index, number, 0, 0, 0, None, _describe(error)))
                continue
            ids = tokenizer.encode(text)
            pieces.append(np.append(ids, tokenizer.eot_id).astype(pieces[0].dtype))
            lost = tokenizer.lost_bytes(text, ids)
            documents.append((index, number, len(pieces[-1]), n_bytes, lost, source, None))
    return np.concatenate(pieces), documents


def _parse(kind: str, content: Content, settings: Settings) -> tuple[str, str | None]:
    """Return a document's text and the name of its source. Raises BadDocumentError."""
    if isinstance(content, BadDocumentError):
        raise content
    text, source = READERS[kind].parse(content, settings)
    if not isinstance(source, str):
        return text, None
    # One line of valid Unicode, unless it is blank.
    return text, sys.intern(" ".join(source.encode("utf-8", "replace").decode().split())) or None


def _describe(error: BadDocumentError | UnicodeEncodeError) -> str:
    if isinstance(error, BadDocumentError):
        return str(error)
    return f"the text holds the lone surrogate {error.object[error.start]!r}, which has no UTF-8 form"
