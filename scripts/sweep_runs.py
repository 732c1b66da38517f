"""The runs of a sweep, checked as train.py would check them: its flags are resolved to configs here."""

import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heinsen.config import ConfigError
from heinsen.data.shards import DatasetError
from heinsen.errors import HeinsenError
from heinsen.models import ModelConfig
from heinsen.sweep.runs import SweepRun
from heinsen.sweep.space import Point, SweepError, Value, format_value
from heinsen.training.config import DataConfig, TrainConfig
from heinsen.training.data import digest_data, open_splits, train_config
from heinsen.training.folder import CONFIG_FILE, find_changes, load_tokenizer_name
from scripts.config_files import load_config, override

TRAIN = Path(__file__).resolve().parent.parent / "train.py"


class RunFactory:
    """Makes the runs of a base config: `config` with `overrides`. With `check_data`, the data must exist here."""

    def __init__(self, config: str, overrides: Mapping[str, str], check_data: bool):
        self._config, self._overrides, self._check_data = config, overrides, check_data
        self.base = self._resolve({})
        self._data: dict[tuple[DataConfig, ModelConfig], tuple[str, str | None]] = {}  # tokenizer and digest; they fit

    def convert(self, field: str, text: str) -> Value:
        """Return the value that the config makes of a text. Raises ConfigError."""
        return functools.reduce(dict.__getitem__, field.split("."), self._resolve({field: text}))

    def _resolve(self, texts: Mapping[str, str]) -> dict[str, Any]:
        """Return the mapping that train.py would make of the flags; `texts` are of a point. Raises ConfigError."""
        return override(override(load_config(self._config), self._overrides), texts, "sweep").to_dict()

    def make(self, point: Point) -> SweepRun:
        """Return the run of a point. Raises HeinsenError if the config rejects the point, or the data do not fit."""
        config = self._make_config(point)
        if self._check_data:
            self._open_data(config)
        return SweepRun(point, config.total_steps, config.tokens_per_step)

    def _make_config(self, point: Point) -> TrainConfig:
        texts = _texts(point)
        values = self._resolve(texts)
        try:
            return train_config(values)
        except ConfigError as error:
            settings = ", ".join(f"{field}={text}" for field, text in texts.items())
            raise SweepError(f"{settings}: {error}") from error

    def _open_data(self, config: TrainConfig) -> tuple[str, str | None]:
        """Return the tokenizer and the digest of a run's data. Raises DatasetError."""
        key = config.data, config.model
        if key not in self._data:
            training, validation = open_splits(config)
            self._data[key] = training[0][0].tokenizer_name, digest_data(training, validation)
        return self._data[key]

    def check_same(self, run: SweepRun, folder: Path) -> None:
        """Raise RunError if the run in the folder, which may have ended, has another config or has read other data.

        Where the data are not here, their path decides.
        """
        if run.refused is None and (folder / CONFIG_FILE).exists():
            config = self._make_config(run.point)
            try:
                data = self._open_data(config)
            except DatasetError:
                data = load_tokenizer_name(folder), None
            find_changes(config, folder, *data)

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
