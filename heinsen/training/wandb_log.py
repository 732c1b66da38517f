"""Metrics in Weights & Biases."""

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heinsen.training.config import TrainConfig
from heinsen.training.folder import RunError


class WandbLog:
    """A run in Weights & Biases that resuming continues; offline where its server cannot be reached.

    Raises RunError if wandb is not installed.
    """

    def __init__(self, config: TrainConfig, workdir: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise RunError(
                "wandb_project is set, but wandb is not installed: pip install wandb, or leave it unset"
            ) from error
        options: dict[str, Any] = dict(
            project=config.wandb_project,
            name=workdir.name,
            id=hashlib.sha256(str(workdir.absolute()).encode()).hexdigest()[:16],
            dir=str(workdir),
            config=dataclasses.asdict(config),
            resume="allow",
        )
        try:
            self._run = wandb.init(**options, settings=wandb.Settings(init_timeout=30, silent=True))
        except wandb.errors.Error:
            os.environ["WANDB_MODE"] = "offline"
            self._run = wandb.init(**options, settings=wandb.Settings(silent=True))

    def write(self, step: int, metrics: Mapping[str, float | int | str]) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()
