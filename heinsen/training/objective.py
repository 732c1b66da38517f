"""Training objectives: the loss of a model and the batches it reads, by `model.objective`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from heinsen.models import ModelConfig, Params, masked_loss, mean_loss
from heinsen.models.masking import mask_tokens
from heinsen.training.config import TrainConfig

Loss = Callable[..., Any]  # the argument of `make_train_step`


@dataclasses.dataclass(frozen=True)
class Objective:
    """A loss and its batches.

    Attributes:
      loss: (model, params, batch, mesh) -> scalar in nats per token, for `make_train_step`. That of "next_token" can
        carry a state.
      arrays: (config, windows [N, T + 1], step, rows [N]) -> the batch's arrays [N, ...].
    """

    loss: Loss
    arrays: Callable[[TrainConfig, np.ndarray, int, np.ndarray], dict[str, np.ndarray]]

    def make_batches(
        self, config: TrainConfig, windows: np.ndarray, step: int, rows: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Return the arrays [A, N / A, ...] of a step's A accumulation passes.

        Args:
          windows: int32 [N, T + 1], those of the step that this process reads.
          step: a masked model's masks depend on it.
          rows: [N], the places of the windows in the global batch.
        """
        arrays, n_passes = self.arrays(config, windows, step, rows), config.accumulation_steps
        if config.carry_state:  # rows of a pass are A apart, as in `TrainState.carry`
            return {name: x.reshape(-1, n_passes, x.shape[-1]).swapaxes(0, 1) for name, x in arrays.items()}
        return {name: x.reshape(n_passes, -1, x.shape[-1]) for name, x in arrays.items()}


def get_objective(model: ModelConfig) -> Objective:
    return _OBJECTIVES[model.objective]


def _next_token_loss(
    model: ModelConfig, params: Params, batch: dict[str, jax.Array], mesh: Mesh | None, **options: Any
) -> Any:
    return mean_loss(model, params, batch["tokens"], mesh, **options)


def _next_token_arrays(config: TrainConfig, windows: np.ndarray, step: int, rows: np.ndarray) -> dict[str, np.ndarray]:
    return {"tokens": windows}


def _masked_arrays(config: TrainConfig, windows: np.ndarray, step: int, rows: np.ndarray) -> dict[str, np.ndarray]:
    """The tokens that other models predict, some of them masked."""
    return mask_tokens(config.model, windows[:, 1:], config.seed, step, rows)


_OBJECTIVES = {
    "next_token": Objective(_next_token_loss, _next_token_arrays),
    "masked": Objective(masked_loss, _masked_arrays),
}
