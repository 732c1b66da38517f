"""The paper's recipe: AdamW, weight decay on matrices and embedding only, clipping, linear warm-up, then cosine."""

import dataclasses
from typing import Annotated, Any

import jax
import optax

from heinsen.config import Limits, check_numbers
from heinsen.models import Params


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Settings of AdamW and its schedule; `configs/default.py` documents them and holds the paper's values."""

    learning_rate: float
    final_learning_rate: Annotated[float, Limits(at_least=0)]
    warmup_steps: Annotated[int, Limits(at_least=0)]
    b1: Annotated[float, Limits(at_least=0, below=1)]
    b2: Annotated[float, Limits(at_least=0, below=1)]
    eps: float
    weight_decay: Annotated[float, Limits(at_least=0)]
    clip_norm: Annotated[float, Limits(unlimited=True)]

    def __post_init__(self) -> None:
        check_numbers(self, "optimizer.")


def make_schedule(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Return the schedule: linear from 0 over warmup_steps, then a cosine to final_learning_rate at total_steps.

    Raises ValueError if the warm-up is as long as the run.
    """
    if config.warmup_steps >= total_steps:
        raise ValueError(
            f"optimizer.warmup_steps = {config.warmup_steps} does not fit a run of {total_steps} steps: "
            "raise total_tokens or lower warmup_steps"
        )
    return optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, config.warmup_steps, total_steps, config.final_learning_rate
    )


def decay_mask(params: Params) -> Any:
    """Return a tree of booleans: True for matrices and the embedding, which decay; biases and scales do not."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("kernel", "embedding"), params)


def make_optimizer(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    """Return AdamW by the config, after clipping the gradient's global norm."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            make_schedule(config, total_steps),
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=decay_mask,
        ),
    )
