"""The stages of a run: what learns, by which loss, in which steps. A run has one, a conversion two."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from heinsen.training.config import TrainConfig
from heinsen.training.conversion import attention_loss, names_of_added, text_loss
from heinsen.training.optimizer import OptimizerConfig


@dataclasses.dataclass(frozen=True)
class Stage:
    """Steps `first_step` to `last_step`, which begin with a new optimizer state and have a schedule of their own.

    Attributes:
      name: in reports; empty for a run of one stage.
      optimizer: its settings.
      loss, trained: as in `heinsen.training.step.make_step`.
      loss_name: the name of the loss among the metrics.
    """

    name: str
    first_step: int
    n_steps: int
    optimizer: OptimizerConfig
    loss: Callable[..., Any] | None = None
    loss_name: str = "loss"
    trained: frozenset[str] | None = None

    @property
    def last_step(self) -> int:
        return self.first_step + self.n_steps - 1


def stages_of(config: TrainConfig) -> list[Stage]:
    """Return the stages of a run, in order."""
    optimizer, conversion = config.optimizer, config.conversion
    if conversion.share is None:
        return [Stage("", 1, config.total_steps, optimizer)]
    n_first, n_second = config.stage_steps
    factor = conversion.attention_learning_rate / optimizer.learning_rate
    of_first = dataclasses.replace(
        optimizer,
        learning_rate=conversion.attention_learning_rate,
        final_learning_rate=factor * optimizer.final_learning_rate,
    )
    loss = partial(attention_loss, config.teacher)
    return [
        Stage("attention", 1, n_first, of_first, loss, "distance", names_of_added(config)),
        Stage("text", 1 + n_first, n_second, optimizer, text_loss),
    ]
