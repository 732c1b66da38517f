"""Continue a prompt with a trained model, at constant cost per token and without a limit of length.

python scripts/generate.py --workdir=RUN --prompt="def main(" [--temperature=0.8 --top_p=0.95 --seed=1]
cat document.txt | python scripts/generate.py --workdir=RUN --stdin --max_tokens=0
"""

import sys
from pathlib import Path

from absl import app, flags, logging

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

WORKDIR = flags.DEFINE_string("workdir", None, "Run folder of train.py, or a folder of export.py.", required=True)
PROMPT = flags.DEFINE_string("prompt", None, "Text to continue; none: a new document.")
STDIN = flags.DEFINE_bool("stdin", False, "Read the prompt from standard input.")
MAX_TOKENS = flags.DEFINE_integer("max_tokens", 256, "Tokens to write; 0: without end.", lower_bound=0)
TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "0: always the likeliest token.")
TOP_K = flags.DEFINE_integer("top_k", 0, "Draw from the k likeliest tokens; 0: all.")
TOP_P = flags.DEFINE_float("top_p", 1.0, "Draw from the fewest likeliest tokens with this total probability.")
SEED = flags.DEFINE_integer("seed", 0, "Seed of the draws.")
STOP_AT_EOT = flags.DEFINE_bool("stop_at_eot", False, "Stop at the end of the document rather than begin another.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}: quote the text of --prompt")
    if STDIN.value and PROMPT.value is not None:
        raise app.UsageError("--prompt and --stdin exclude each other")
    logging.set_verbosity(logging.WARNING)
    from heinsen.config import ConfigError
    from heinsen.data.tokenizer import get_tokenizer
    from heinsen.decoding import Sampling, generate
    from heinsen.parallel import make_mesh
    from heinsen.training.checkpoint import CheckpointError
    from heinsen.training.loop import load_params
    from heinsen.training.run import RunError, load_run

    try:
        sampling = Sampling(TEMPERATURE.value, TOP_K.value, TOP_P.value)
        config = load_run(Path(WORKDIR.value))
        tokenizer = get_tokenizer(config.data.tokenizer)
        text = sys.stdin.read() if STDIN.value else PROMPT.value
        prompt = [tokenizer.eot_id] if text is None else tokenizer.encode(text)
        if len(prompt) == 0:
            raise ValueError("the prompt encodes to no tokens: give some text, or no prompt for a new document")
        _, params = load_params(Path(WORKDIR.value), config.model, make_mesh())
    except (ConfigError, CheckpointError, RunError, ValueError) as error:
        sys.exit(f"error: {error}")
    stop_id = tokenizer.eot_id if STOP_AT_EOT.value else None
    decoder = tokenizer.stream_decoder()
    try:
        print(text or "", end="", flush=True)
        for token in generate(config.model, params, prompt, sampling, SEED.value, MAX_TOKENS.value or None, stop_id):
            print(decoder.feed(token), end="", flush=True)
        print(decoder.flush(), flush=True)
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(0)


if __name__ == "__main__":
    app.run(main)
