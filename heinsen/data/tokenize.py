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

from heinsen.data.readers import READERS, BadDocumentError, PreparationError, Row, Settings
from heinsen.data.shards import token_dtype
from heinsen.data.sources import Document
from heinsen.data.tokenizer import Tokenizer, get_tokenizer

BATCH_BYTES = 2 << 20  # of raw documents sent to a worker at a time


class TokenizedDocument(NamedTuple):
    """The tokens of a document, or the reason why it has none.

    Attributes:
      tokens: `token_dtype` `[n_tokens]`, the end-of-text token included.
      n_bytes: UTF-8 bytes of the text.
      source: name of the document's source; None if it names none.
      problem: what is wrong with the document, else None.
    """

    tokens: np.ndarray
    n_bytes: int
    source: str | None
    problem: str | None = None


_Tokenized = concurrent.futures.Future[list[TokenizedDocument]]


def tokenize_documents(
    documents: Iterator[Document], settings: Settings, folder: Path, workers: int
) -> Generator[tuple[Document, TokenizedDocument], None, None]:
    """Yield each document with its tokens, in order, tokenized ahead by `workers` processes; 1 uses this process.

    folder: the one that holds the tokenizer's file, if it is a file.

    Closing the generator ends the workers. Raises PreparationError if one of them dies.
    """
    work = functools.partial(_tokenize_batch, settings, folder)
    if workers == 1:
        for batch in _batch(documents):
            yield from zip(batch, work(batch), strict=True)
        return
    # Spawned, not forked: the caller may have threads.
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, context, initializer=_start_worker)
    queue: collections.deque[tuple[list[Document], _Tokenized]] = collections.deque()
    try:
        for batch in _batch(documents):
            queue.append((batch, pool.submit(work, batch)))
            if len(queue) > 2 * workers:  # bounds memory, and keeps workers busy while results are written
                batch, tokenized = queue.popleft()
                yield from zip(batch, tokenized.result(), strict=True)
        for batch, tokenized in queue:
            yield from zip(batch, tokenized.result(), strict=True)
    except concurrent.futures.process.BrokenProcessPool as error:
        raise PreparationError(
            "a worker process died, perhaps for lack of memory. Finished shards are kept: rerun the same command to "
            "resume, with fewer --workers if memory was the reason"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _batch(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        text = document.content.text if isinstance(document.content, Row) else document.content
        size += len(text) if isinstance(text, bytes | str) else 1
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


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


def _tokenize_batch(settings: Settings, folder: Path, documents: list[Document]) -> list[TokenizedDocument]:
    tokenizer = _get_tokenizer_once(settings.tokenizer, folder)
    return [_tokenize(document, tokenizer, settings) for document in documents]


def _tokenize(document: Document, tokenizer: Tokenizer, settings: Settings) -> TokenizedDocument:
    try:
        if isinstance(document.content, BadDocumentError):
            raise document.content
        text, source = READERS[document.kind].parse(document.content, settings)
        n_bytes = len(text.encode("utf-8"))
    except (BadDocumentError, UnicodeEncodeError) as error:
        problem = str(error)
        if isinstance(error, UnicodeEncodeError):
            problem = f"the text holds the lone surrogate {error.object[error.start]!r}, which has no UTF-8 form"
        return TokenizedDocument(np.empty(0, np.uint16), 0, None, problem)
    tokens = np.append(tokenizer.encode(text), tokenizer.eot_id).astype(token_dtype(tokenizer.vocab_size))
    name = None
    if isinstance(source, str):  # as one line of valid Unicode, unless it is blank
        name = sys.intern(" ".join(source.encode("utf-8", "replace").decode().split())) or None
    return TokenizedDocument(tokens, n_bytes, name)
