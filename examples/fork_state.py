"""Read a text once, keep the state of constant size, and continue from it many times.

    python examples/fork_state.py

The model is small and untrained, and writes noise. Everything shown here holds for a trained model, whose parameters
`heinsen.weights.load_params` reads from a run folder. scripts/generate.py does the same from the command line, with
--save_state and --load_state.
"""

import tempfile
from pathlib import Path

import jax
import numpy as np

from configs import default
from heinsen.config import from_mapping
from heinsen.data.tokenizer import get_tokenizer
from heinsen.decoding import Prefix, Sampling, continue_texts, fork, load_prefix, read, save_prefix, step_params
from heinsen.models import ModelConfig, Params, init_params

TOKENIZER = get_tokenizer("bytes")
SIZES = dict(
    vocab_size=TOKENIZER.vocab_size, padded_vocab_size=264, n_layers=2, d_model=32, n_heads=2, d_key=8, d_value=8
)
MODEL = from_mapping(ModelConfig, default.get_config().model.to_dict() | SIZES)
DOCUMENT = "It was read once. "


def write(params: Params, prefix: Prefix, seed: int, n_tokens: int) -> list[str]:
    """Return a continuation of each row of the prefix; for one seed, row r always draws the same tokens."""
    pieces = continue_texts(MODEL, step_params(MODEL, params), prefix, Sampling(), seed, max_tokens=n_tokens)
    tokens = np.concatenate([tokens for tokens, _ in pieces], axis=1)
    return [TOKENIZER.decode_bytes(row).decode("utf-8", "replace") for row in tokens]


def main(n_tokens: int = 32, copies: int = 3, lengths: tuple[int, ...] = (30, 500)) -> dict[str, object]:
    """Read, fork and save; print the results and return them."""
    params = jax.jit(init_params, static_argnums=0)(MODEL, jax.random.key(0))
    sizes = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "document.state"
        for n in lengths:
            document = TOKENIZER.encode(DOCUMENT * n)
            prefix = read(MODEL, params, [document])
            save_prefix(path, MODEL, params, prefix)
            sizes[len(document)] = path.stat().st_size
            print(f"{len(document):7,} tokens read; the saved state has {sizes[len(document)]:,} bytes")

        print(f"\n{copies} continuations of the last text in one batch, without reading it again:")
        forked = write(params, fork(prefix, copies), seed=1, n_tokens=n_tokens)
        for text in forked:
            print(f"  ...{text!r}")

        loaded = load_prefix(path, MODEL, params)
        again = write(params, fork(loaded, copies), seed=1, n_tokens=n_tokens)
        print(f"\nthe same from the file: {again == forked}")

    question = TOKENIZER.encode("And what came then? ")
    asked = read(MODEL, params, [question], state=loaded.state)
    whole = read(MODEL, params, [np.concatenate([document, question])])
    error = float(np.max(np.abs(asked.logits - whole.logits)))
    print(f"{len(question)} more tokens after the state give the logits of the whole text, to {error:.0e}")
    return {"sizes": sizes, "forked": forked, "again": again, "error": error}


if __name__ == "__main__":
    main()
