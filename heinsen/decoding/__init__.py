"""Generation: read prompts in parallel, draw tokens in one compiled loop, at a per-token cost independent of context.

    prefix = prefill(config, params, prompts, lengths)              the next tokens' logits, the state after the prompts
    tokens, prefix, _ = decode(config, step_params(config, params), prefix, ...)           many tokens per call
    save_prefix(path, config, params, prefix); fork(prefix, 8)

A `Prefix` is all there is to know about text that was read: it can be saved to disk, and continued many times.
Only layers with a cache, such as softmax attention's, grow with the context.
"""

from heinsen.decoding.generation import continue_texts, decode, fork, generate, step_params
from heinsen.decoding.prompts import Prefix, check_prompt, prefill, read, score
from heinsen.decoding.sampling import Sampling, sample
from heinsen.decoding.saved_state import StateError, hash_params, load_prefix, save_prefix
from heinsen.decoding.stop_strings import StopStrings

__all__ = [
    "Prefix",
    "Sampling",
    "StateError",
    "StopStrings",
    "check_prompt",
    "continue_texts",
    "decode",
    "hash_params",
    "fork",
    "generate",
    "load_prefix",
    "prefill",
    "read",
    "sample",
    "save_prefix",
    "score",
    "step_params",
]
