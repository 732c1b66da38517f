"""heinsen: softmax attention with constant cost per token, in JAX."""

from typing import TYPE_CHECKING, Any

from heinsen.version import __version__

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    """Import what is used first: programs show their help, and configs are read, without importing JAX."""
    if name in __all__:
        from heinsen.ops import api, linear, sigmoid, states

        for module in (api, states, sigmoid, linear):
            if hasattr(module, name):
                return globals().setdefault(name, getattr(module, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
