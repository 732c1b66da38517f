"""Continue prompts with a trained model, at constant cost per token and without a limit on the length.

    python scripts/generate.py --workdir=RUN --prompt="def main(" [--temperature=0.8 --top_p=0.95 --seed=1]
    cat document.txt | python scripts/generate.py --workdir=RUN --stdin --max_tokens=0

A long document is read once, kept as a state of constant size, and continued or queried many times:

    cat document.txt | python scripts/generate.py --workdir=RUN --stdin --max_tokens=0 --save_state=document.state
    python scripts/generate.py --workdir=RUN --load_state=document.state --prompt="In short, " --samples=4
"""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags, logging

from heinsen.errors import InputError, describe, exit_on_error
from scripts.cli import parse_flags, refuse, show_help

WORKDIR = flags.DEFINE_string("workdir", None, "Run folder of train.py, or a folder of export.py.", required=True)
PROMPT = flags.DEFINE_multi_string("prompt", None, "Text to continue; may be repeated. Default: a new document.")
STDIN = flags.DEFINE_bool("stdin", False, "Read the prompt from standard input.")
LOAD_STATE = flags.DEFINE_string("load_state", None, "Continue from the state that --save_state wrote to this file.")
SAVE_STATE = flags.DEFINE_string("save_state", None, "Save the state after all that was read and written to this file.")
MAX_TOKENS = flags.DEFINE_integer(
    "max_tokens", 256, "Tokens to write; 0: without end, or none if a state is saved.", lower_bound=0
)
SAMPLES = flags.DEFINE_integer("samples", 1, "Continuations of each prompt.", lower_bound=1)
STREAM = flags.DEFINE_bool("stream", None, "Print text as it is generated; by default if there is only one text.")
TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "0: always the most likely token.")
TOP_K = flags.DEFINE_integer("top_k", 0, "Sample from the k most likely tokens; 0: all.")
TOP_P = flags.DEFINE_float("top_p", 1.0, "Sample from the fewest most likely tokens with this total probability.")
MIN_P = flags.DEFINE_float("min_p", 0.0, "Sample from tokens with at least this fraction of the highest probability.")
REPETITION_PENALTY = flags.DEFINE_float("repetition_penalty", 1.0, "Above 1: fewer tokens that occurred in the text.")
SEED = flags.DEFINE_integer("seed", 0, "Seed of the samples.")
STOP = flags.DEFINE_multi_string("stop", [], "End a text before this string; may be repeated.")
STOP_AT_EOT = flags.DEFINE_bool("stop_at_eot", False, "Stop at the end of the document instead of beginning another.")
DTYPE = flags.DEFINE_string("dtype", None, "float32 or bfloat16, for matrices and matmuls; default: the run's.")

show_help(__name__)

import numpy as np

from heinsen.data.tokenizer import Tokenizer, get_tokenizer
from heinsen.decoding import (
    Prefix,
    Sampling,
    StopStrings,
    check_prompt,
    continue_texts,
    fork,
    hash_params,
    load_prefix,
    read,
    save_prefix,
    step_params,
)
from heinsen.host import keep_compilations
from heinsen.models import ModelConfig, Params, check_room
from heinsen.parallel import make_mesh
from heinsen.quantities import format_bytes
from heinsen.training.folder import load_run, load_tokenizer_name
from heinsen.weights import load_params


def main(argv: list[str]) -> None:
    if STDIN.value and PROMPT.value:
        refuse("--prompt and --stdin exclude each other")
    logging.set_verbosity(logging.WARNING)
    with exit_on_error():
        try:
            continuation = prepare()
        except ValueError as error:  # a flag's value that the library rejects
            raise InputError(str(error)) from error
        prefix = continuation.prefix if continuation.max_tokens == 0 else write_texts(continuation)
        if SAVE_STATE.value is not None:
            save(continuation, prefix)


@dataclasses.dataclass(frozen=True)
class Continuation:
    """What to continue, and how: one row for each text, the samples of a prompt next to each other.

    `params` are those of the decoding steps alone: the run's own, which `params_hash` names, are gone once
    prompts are read.
    """

    model: ModelConfig
    params: Params
    params_hash: str
    tokenizer: Tokenizer
    sampling: Sampling
    prefix: Prefix
    texts: list[str]
    prompts: list[Sequence[int]]
    max_tokens: int | None

    @property
    def is_streamed(self) -> bool:
        return is_streamed(len(self.texts))


def prepare() -> Continuation:
    """Load the model and read the prompts. Raises HeinsenError, and ValueError for impossible flags."""
    sampling = Sampling(TEMPERATURE.value, TOP_K.value, TOP_P.value, MIN_P.value, REPETITION_PENALTY.value)
    StopStrings(STOP.value)
    workdir = Path(WORKDIR.value)
    config = load_run(workdir)
    keep_compilations()
    tokenizer = get_tokenizer(load_tokenizer_name(workdir), workdir)
    # The model may have more ids than the tokenizer, which are never drawn.
    model = dataclasses.replace(config.model, dtype=DTYPE.value or config.model.dtype, vocab_size=tokenizer.vocab_size)
    # None: a new document, or the continuation of a loaded state.
    texts: list[str | None] = [sys.stdin.read()] if STDIN.value else PROMPT.value or [None]
    check_flags(len(texts))
    prompts = [encode(tokenizer, model, text) for text in texts]
    _, params = load_params(workdir, config.model, make_mesh())
    params_hash = hash_params(params) if SAVE_STATE.value or LOAD_STATE.value else ""
    if LOAD_STATE.value is None:
        prefix = read(model, params, prompts)
    else:
        prefix = fork(load_prefix(Path(LOAD_STATE.value), model, params_hash), len(prompts))
        if len(prompts[0]):
            prefix = read(model, params, prompts, prefix.state)
    max_tokens = MAX_TOKENS.value or (None if SAVE_STATE.value is None else 0)
    if model.position == "learned" and max_tokens is None:
        raise InputError(f"--max_tokens=0 writes without end: this model ends after {model.n_positions} positions")
    check_room(model, int((prefix.state.n_tokens - prefix.state.document_start).max()) + (max_tokens or 0))
    n = SAMPLES.value
    return Continuation(
        model=model,
        params=step_params(model, params, donate=True),
        params_hash=params_hash,
        tokenizer=tokenizer,
        sampling=sampling,
        prefix=fork(prefix, n),
        # A document whose state is saved is not printed again.
        texts=["" if text is None or (STDIN.value and SAVE_STATE.value) else text for text in texts for _ in range(n)],
        prompts=[prompt for prompt in prompts for _ in range(n)],
        max_tokens=max_tokens,
    )


def check_flags(n_prompts: int) -> None:
    """Raise InputError for flags that do not go together, and a file that cannot be written."""
    n_texts = n_prompts * SAMPLES.value
    if SAVE_STATE.value is not None:
        path = Path(SAVE_STATE.value)
        if path.is_dir():
            raise InputError(f"--save_state={path} is a folder: give the name of a file")
        if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
            raise InputError(
                f"--save_state={path}: {path.parent} is no folder that can be written to; give another file"
            )
        if n_texts > 1:
            raise InputError("--save_state saves one text: give one prompt and --samples=1")
        if STOP.value:
            raise InputError("--save_state saves what was read, tokens after a --stop too: leave one of both out")
    if STREAM.value and n_texts > 1:
        raise InputError("--stream shows one text as it is generated: give one prompt and --samples=1")
    if MAX_TOKENS.value == 0 and SAVE_STATE.value is None and not is_streamed(n_texts):
        raise InputError("--max_tokens=0 writes without end, which needs a single streamed text: give a number")


def is_streamed(n_texts: int) -> bool:
    return n_texts == 1 if STREAM.value is None else STREAM.value


def encode(tokenizer: Tokenizer, model: ModelConfig, text: str | None) -> Sequence[int]:
    """Return the tokens of a prompt, or for None what begins a document, unless a loaded state is continued."""
    if text is None:
        return [tokenizer.eot_id] if LOAD_STATE.value is None else []
    tokens = tokenizer.encode(text)
    if len(tokens) == 0:
        raise InputError("the prompt encodes to no tokens: give some text, or no prompt for a new document")
    return check_prompt(model, tokens)


# ---- output --------------------------------------------------------------------------------------


class Output:
    """The texts of all rows: a single one is printed as it is generated, several at the end."""

    def __init__(self, continuation: Continuation):
        self._texts, self._streamed = list(continuation.texts), continuation.is_streamed
        self._decoders = [continuation.tokenizer.stream_decoder() for _ in continuation.texts]
        self._stops = [StopStrings(STOP.value) for _ in continuation.texts]
        if self._streamed:
            print(self._texts[0], end="", flush=True)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found in every text."""
        return all(stop.found for stop in self._stops)

    def add(self, tokens: np.ndarray) -> None:
        """Append tokens [rows, N]; negative ids are padding."""
        for row, (decoder, stop) in enumerate(zip(self._decoders, self._stops, strict=True)):
            for token in tokens[row][tokens[row] >= 0]:
                self._append(row, stop.feed(decoder.feed(int(token))))

    def close(self) -> None:
        """Append what was held back, and print the texts."""
        for row, (decoder, stop) in enumerate(zip(self._decoders, self._stops, strict=True)):
            self._append(row, stop.feed(decoder.flush()) + stop.flush())
        if self._streamed:
            print(flush=True)
        else:
            for row, text in enumerate(self._texts, 1):
                print(f"---- {row} of {len(self._texts)}\n{text}", flush=True)

    def _append(self, row: int, text: str) -> None:
        self._texts[row] += text
        if self._streamed:
            print(text, end="", flush=True)


def write_texts(continuation: Continuation) -> Prefix:
    """Generate and print the texts; return the prefix after the last tokens. Ctrl-C, or no reader, ends the texts."""
    prefix = continuation.prefix
    pieces = continue_texts(
        continuation.model,
        continuation.params,
        prefix,
        continuation.sampling,
        SEED.value,
        continuation.max_tokens,
        stop_id=continuation.tokenizer.eot_id if STOP_AT_EOT.value else None,
        texts=continuation.prompts,
        tokens_per_call=8 if continuation.is_streamed else 32,
    )
    try:
        output = Output(continuation)
        with contextlib.suppress(KeyboardInterrupt):
            for tokens, prefix in pieces:  # noqa: B007 (returned after the loop)
                output.add(tokens)
                if output.stopped:
                    break
        output.close()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes when it exits
    return prefix


def save(continuation: Continuation, prefix: Prefix) -> None:
    """Write --save_state. Raises InputError."""
    path = Path(SAVE_STATE.value)
    try:
        save_prefix(path, continuation.model, continuation.params_hash, prefix)
    except OSError as error:
        raise InputError(f"the state cannot be saved: {describe(error)}. Give another --save_state") from error
    size = format_bytes(path.stat().st_size)
    print(f"{path}: the state after {int(prefix.state.n_tokens[0]):,} tokens, {size}", file=sys.stderr)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
