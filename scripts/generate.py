"""Continue prompts with a trained model, at constant cost per token and without a limit of length.

    python scripts/generate.py --workdir=RUN --prompt="def main(" [--temperature=0.8 --top_p=0.95 --seed=1]
    cat document.txt | python scripts/generate.py --workdir=RUN --stdin --max_tokens=0

A long document is read once, kept as a state of constant size, and continued or asked about many times:

    cat document.txt | python scripts/generate.py --workdir=RUN --stdin --max_tokens=0 --save_state=document.state
    python scripts/generate.py --workdir=RUN --load_state=document.state --prompt="In short, " --samples=4
"""

import copy
import dataclasses
import sys
from pathlib import Path

from absl import app, flags, logging

WORKDIR = flags.DEFINE_string("workdir", None, "Run folder of train.py, or a folder of export.py.", required=True)
PROMPT = flags.DEFINE_multi_string("prompt", None, "Text to continue; may be repeated. None: a new document.")
STDIN = flags.DEFINE_bool("stdin", False, "Read the prompt from standard input.")
LOAD_STATE = flags.DEFINE_string("load_state", None, "Go on after what --save_state has kept in this file.")
SAVE_STATE = flags.DEFINE_string("save_state", None, "Keep what was read and written in this file.")
MAX_TOKENS = flags.DEFINE_integer(
    "max_tokens", 256, "Tokens to write; 0: without end, or none where a state is saved.", lower_bound=0
)
SAMPLES = flags.DEFINE_integer("samples", 1, "Continuations of each prompt.", lower_bound=1)
STREAM = flags.DEFINE_bool("stream", None, "Print text as it comes; by default if there is one text. Else at the end.")
TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "0: always the likeliest token.")
TOP_K = flags.DEFINE_integer("top_k", 0, "Draw from the k likeliest tokens; 0: all.")
TOP_P = flags.DEFINE_float("top_p", 1.0, "Draw from the fewest likeliest tokens with this total probability.")
MIN_P = flags.DEFINE_float("min_p", 0.0, "Draw from tokens at least so many times as likely as the likeliest.")
REPETITION_PENALTY = flags.DEFINE_float("repetition_penalty", 1.0, "Above 1: less of what is in the text already.")
SEED = flags.DEFINE_integer("seed", 0, "Seed of the draws.")
STOP = flags.DEFINE_multi_string("stop", [], "End a text before this string; may be given several times.")
STOP_AT_EOT = flags.DEFINE_bool("stop_at_eot", False, "Stop at the end of the document rather than begin another.")
DTYPE = flags.DEFINE_string("dtype", None, "float32 or bfloat16, of the matrices and matmuls; none: the run's.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}: quote the text of --prompt")
    if STDIN.value and PROMPT.value:
        raise app.UsageError("--prompt and --stdin exclude each other")
    logging.set_verbosity(logging.WARNING)
    from heinsen.config import ConfigError
    from heinsen.data.tokenizer import get_tokenizer
    from heinsen.decoding import (
        Sampling,
        StateError,
        StopStrings,
        check_prompt,
        continue_texts,
        fork,
        load_prefix,
        read,
        save_prefix,
        step_params,
    )
    from heinsen.models import check_room
    from heinsen.parallel import make_mesh
    from heinsen.training.checkpoint import CheckpointError
    from heinsen.training.run import RunError, load_run
    from heinsen.weights import load_params

    try:
        sampling = Sampling(TEMPERATURE.value, TOP_K.value, TOP_P.value, MIN_P.value, REPETITION_PENALTY.value)
        stops = StopStrings(STOP.value)
        config = load_run(Path(WORKDIR.value))
        model = config.model if DTYPE.value is None else dataclasses.replace(config.model, dtype=DTYPE.value)
        tokenizer = get_tokenizer(config.data.tokenizer)
        # None: a new document, or what a loaded state goes on with.
        texts = [sys.stdin.read()] if STDIN.value else PROMPT.value or [None]
        check_flags(len(texts))
        begin = [tokenizer.eot_id] if LOAD_STATE.value is None else []
        prompts = [begin if text is None else tokenizer.encode(text) for text in texts]
        if any(text is not None and len(prompt) == 0 for text, prompt in zip(texts, prompts, strict=True)):
            raise ValueError("the prompt encodes to no tokens: give some text, or no prompt for a new document")
        prompts = [check_prompt(model, prompt) if len(prompt) else [] for prompt in prompts]
        _, params = load_params(Path(WORKDIR.value), config.model, make_mesh())
        prefix = None
        if LOAD_STATE.value is not None:
            prefix = fork(load_prefix(Path(LOAD_STATE.value), model, params), len(prompts))
        if len(prompts[0]):
            prefix = read(model, params, prompts, None if prefix is None else prefix.state)
        max_tokens = MAX_TOKENS.value or (None if SAVE_STATE.value is None else 0)
        if model.position == "learned" and max_tokens is None:
            raise ValueError(f"--max_tokens=0 writes without end: this model ends after {model.n_positions} positions")
        check_room(model, int((prefix.state.n_tokens - prefix.state.document_start).max()) + (max_tokens or 0))
    except (ConfigError, CheckpointError, RunError, StateError, ValueError) as error:
        sys.exit(f"error: {error}")
    prefix, n_rows = fork(prefix, SAMPLES.value), len(texts) * SAMPLES.value
    stop_id = tokenizer.eot_id if STOP_AT_EOT.value else None
    streams = shows_as_it_comes(n_rows)
    read_texts = [prompt for prompt in prompts for _ in range(SAMPLES.value)]
    pieces = continue_texts(
        model, step_params(model, params), prefix, sampling, SEED.value, max_tokens, stop_id, read_texts,
        tokens_per_call=8 if streams else 32,
    )  # fmt: skip
    decoders = [tokenizer.stream_decoder() for _ in range(n_rows)]
    stops = [copy.copy(stops) for _ in range(n_rows)]
    written = [text or "" for text in texts for _ in range(SAMPLES.value)]

    def show(row: int, text: str) -> None:
        written[row] += text
        if streams:
            print(text, end="", flush=True)

    try:
        if streams:
            print(written[0], end="", flush=True)
        for tokens, prefix in pieces:  # noqa: B007
            for row, stop in enumerate(stops):
                for token in tokens[row][tokens[row] >= 0]:
                    show(row, stop.feed(decoders[row].feed(int(token))))
            if all(stop.found for stop in stops):
                break
        for row, stop in enumerate(stops):
            show(row, stop.feed(decoders[row].flush()) + stop.flush())
        if streams:
            print(flush=True)
        else:
            for row, text in enumerate(written):
                print(f"---- {row + 1} of {n_rows}\n{text}", flush=True)
    except BrokenPipeError:
        sys.exit(0)
    except KeyboardInterrupt:
        print(flush=True)
    if SAVE_STATE.value is not None:
        try:
            save_prefix(Path(SAVE_STATE.value), model, params, prefix)
        except OSError as error:
            sys.exit(f"error: the state cannot be saved: {error}. Give another --save_state")


def shows_as_it_comes(n_texts: int) -> bool:
    return n_texts == 1 if STREAM.value is None else STREAM.value


def check_flags(n_prompts: int) -> None:
    """Raises ValueError for flags that do not go together."""
    n_texts = n_prompts * SAMPLES.value
    if SAVE_STATE.value is not None and n_texts > 1:
        raise ValueError("--save_state keeps one text: give one prompt and --samples=1")
    if STREAM.value and n_texts > 1:
        raise ValueError("--stream shows one text as it comes: give one prompt and --samples=1")
    if MAX_TOKENS.value == 0 and SAVE_STATE.value is None and not shows_as_it_comes(n_texts):
        raise ValueError("--max_tokens=0 writes without end, which only one text that is streamed can: give a number")


if __name__ == "__main__":
    app.run(main)
