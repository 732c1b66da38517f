"""The paper's recipe: AdamW, weight decay on matrices and embeddings only, clipping, linear warm-up, then cosine.

Or Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon) for the matrices of the layers: their
momentum, orthogonalized. Its updates have the size of Adam's (Liu et al., 2025, "Muon is scalable for LLM training")
times `muon_multiple`. All else stays with AdamW.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Annotated, Any

import jax
import optax
import optax.contrib

from heinsen.config import Limits, check_numbers
from heinsen.models import Params

_MUON_RMS = 0.2  # root mean square of an update by Adam, about


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Settings of the optimizer and its schedule; `configs/default.py` documents them and holds the paper's values."""

    name: str
    muon_multiple: float
    learning_rate: float
    final_learning_rate: Annotated[float, Limits(at_least=0)]
    warmup_steps: Annotated[int, Limits(at_least=0)]
    b1: Annotated[float, Limits(at_least=0, below=1)]
    b2: Annotated[float, Limits(at_least=0, below=1)]
    eps: float
    weight_decay: Annotated[float, Limits(at_least=0)]
    clip_norm: Annotated[float, Limits(unlimited=True)]

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise ValueError(f"optimizer.name = {self.name!r}: choose {' or '.join(OPTIMIZERS)}")
        check_numbers(self, "optimizer.")


def make_schedule(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Return the schedule: linear from 0 over warmup_steps, then a cosine to final_learning_rate at total_steps.

    Raises ValueError if the warm-up is as long as the run.
    """
    if config.warmup_steps >= total_steps:
        raise ValueError(
            f"optimizer.warmup_steps = {config.warmup_steps} does not fit a run of {total_steps} steps, or a stage of "
            "it: raise total_tokens or lower warmup_steps"
        )
    return optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, config.warmup_steps, total_steps, config.final_learning_rate
    )


def decay_mask(params: Params) -> Any:
    """Return a tree of booleans: True for matrices and embeddings, which decay; biases and scales do not."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("kernel", "embedding"), params)


def make_optimizer(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    """Return the optimizer by the config, after clipping the gradient's global norm."""
    return make_optimizer_of_rate(config, make_schedule(config, total_steps))


def make_optimizer_of_rate(
    config: OptimizerConfig, learning_rate: optax.Schedule | jax.Array | float
) -> optax.GradientTransformation:
    """Return the optimizer with another learning rate than the config's, which may be traced."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        OPTIMIZERS[config.name](config),
        optax.add_decayed_weights(config.weight_decay, decay_mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def _adam(config: OptimizerConfig) -> optax.GradientTransformation:
    return optax.scale_by_adam(config.b1, config.b2, config.eps)


def _muon(config: OptimizerConfig) -> optax.GradientTransformation:
    def label(path: tuple[Any, ...], _: Any) -> str:
        return "muon" if path[0].key == "layers" and path[-1].key == "kernel" else "adam"

    def scale(updates: Any, _: Any) -> Any:
        return jax.tree.map(lambda x: _MUON_RMS * config.muon_multiple * math.sqrt(max(x.shape[-2:])) * x, updates)

    # Parameters of layers are stacked along their first axis: a matrix is its last two.
    axes = lambda updates: jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(-2, -1), updates)
    muon = optax.chain(optax.contrib.scale_by_muon(weight_dimension_numbers=axes), optax.stateless(scale))
    labels = lambda params: jax.tree_util.tree_map_with_path(label, params)
    return optax.partition({"muon": muon, "adam": _adam(config)}, labels)


OPTIMIZERS: dict[str, Callable[[OptimizerConfig], optax.GradientTransformation]] = {"adamw": _adam, "muon": _muon}
