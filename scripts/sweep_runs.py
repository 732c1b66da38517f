"""The runs of a sweep, checked as train.py would check them: its flags are resolved to configs here."""

import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from heinsen.config import ConfigError
from heinsen.data.mixture import open_mixture
from heinsen.data.shards import DatasetError
from heinsen.errors import HeinsenError
from heinsen.models import ModelConfig
from heinsen.sweep.runs import SweepRun
from heinsen.sweep.space import Point, SweepError, Value, format_value
from heinsen.training.config import DataConfig
from heinsen.training.data import TRAIN_SPLIT, digest_data, open_splits, train_config
from scripts.config_files import load_config, override

TRAIN = Path(__file__).resolve().parent.parent / "train.py"


class RunFactory:
    """Makes the runs of a base config: `config` with `overrides`. With `check_data`, the data must exist here."""

    def __init__(self, config: str, overrides: Mapping[str, str], check_data: bool):
        self._config, self._overrides, self._check_data = config, overrides, check_data
        self.base = self._resolve({})
        self._seen: set[tuple[DataConfig, ModelConfig]] = set()  # found to fit each other

    def convert(self, field: str, text: str) -> Value:
        """Return the value that the config makes of a text. Raises ConfigError."""
        return functools.reduce(dict.__getitem__, field.split("."), self._resolve({field: text}))

    def _resolve(self, texts: Mapping[str, str]) -> dict[str, Any]:
        """Return the mapping that train.py would make of the flags; `texts` are of a point. Raises ConfigError."""
        return override(override(load_config(self._config), self._overrides), texts, "sweep").to_dict()

    def make(self, point: Point) -> SweepRun:
        """Return the run of a point. Raises HeinsenError if the config rejects the point, or the data do not fit."""
        texts = _texts(point)
        values = self._resolve(texts)
        try:
            config = train_config(values)
        except ConfigError as error:
            settings = ", ".join(f"{field}={text}" for field, text in texts.items())
            raise SweepError(f"{settings}: {error}") from error
        if self._check_data and (config.data, config.model) not in self._seen:
            open_splits(config)
            self._seen.add((config.data, config.model))
        return SweepRun(point, config.total_steps, config.tokens_per_step)

    def data_digest(self, paths: Sequence[str]) -> str | None:
        """Return the digest of the training and validation data at these paths; None if they are not here."""
        splits = TRAIN_SPLIT, self.base["data"]["validation_split"]
        try:
            return digest_data(*(open_mixture(path, split) for path in paths for split in splits))
        except DatasetError:
            return None

    def make_or_refuse(self, point: Point) -> SweepRun:
        """Return the run of a point; if `make` raises, a run that is marked as refused."""
        try:
            return self.make(point)
        except HeinsenError as error:
            return SweepRun(point, 0, 0, str(error))

    def command(self, run: SweepRun, folder: Path) -> list[str]:
        """Return the command that executes a run in its folder."""
        fields = {**self._overrides, **_texts(run.point)}
        settings = [f"--config.{field}={text}" for field, text in fields.items()]
        return [sys.executable, str(TRAIN), f"--config={self._config}", f"--workdir={folder}", *settings]


def _texts(point: Mapping[str, Value]) -> dict[str, str]:
    """Return the flags' texts."""
    return {field: format_value(value) for field, value in point.items()}
