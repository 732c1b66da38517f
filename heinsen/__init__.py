"""heinsen: softmax attention with constant cost per token, in JAX."""

from heinsen.ops.api import attention, log_attention
from heinsen.ops.linear import LinearState, init_linear_state, linear_attention
from heinsen.ops.sigmoid import sigmoid_attention, sigmoid_attention_cached
from heinsen.ops.states import (
    LogState,
    MeanState,
    extend_context,
    init_state,
    merge_states,
    query_state,
    update_state,
)
from heinsen.version import __version__

__all__ = [
    "__version__",
    "LinearState",
    "LogState",
    "MeanState",
    "attention",
    "extend_context",
    "init_linear_state",
    "init_state",
    "linear_attention",
    "log_attention",
    "merge_states",
    "query_state",
    "sigmoid_attention",
    "sigmoid_attention_cached",
    "update_state",
]
