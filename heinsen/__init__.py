"""heinsen: softmax attention with constant cost per token, in JAX."""

from heinsen.attention import (
    LogState,
    MeanState,
    attention,
    init_state,
    log_attention,
    merge_states,
    query_state,
    sigmoid_attention,
    sigmoid_attention_cached,
    update_state,
)
from heinsen.version import __version__

__all__ = [
    "__version__",
    "LogState",
    "MeanState",
    "attention",
    "init_state",
    "log_attention",
    "merge_states",
    "query_state",
    "sigmoid_attention",
    "sigmoid_attention_cached",
    "update_state",
]
