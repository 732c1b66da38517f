"""The runs of a sweep, checked as train.py would check them: its flags are resolved to configs here."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

from configs import explain_missing, find_config, load_config
from heinsen.config import ConfigError, from_mapping
from heinsen.errors import HeinsenError
from heinsen.models import ModelConfig
from heinsen.sweep.runs import SweepRun
from heinsen.sweep.space import Point, SweepError, Value, format_value
from heinsen.training.config import DataConfig, TrainConfig
from heinsen.training.data import TRAIN_SPLIT, open_split

TRAIN = Path(__file__).resolve().parent.parent / "train.py"


class RunFactory:
    """Makes the runs of a base config: `config` with `overrides`. With `check_data`, the data must exist here."""

    def __init__(self, config: str, overrides: Mapping[str, str], check_data: bool):
        load_config(config)
        self._config, self._overrides, self._check_data = config, overrides, check_data
        self.base = resolve(config, overrides)
        self._seen: set[tuple[DataConfig, ModelConfig]] = set()  # found to fit each other

    def convert(self, field: str, text: str) -> Value:
        """Return the value that the config makes of a text. Raises SweepError."""
        if isinstance(group := _look_up(self.base, field), Mapping):
            raise SweepError(f"--sweep.{field}={text}: {field} is a group of fields ({', '.join(group)}): sweep those")
        if text == "None" and self._is_none(field):
            return None  # a flag cannot say so, and need not
        return _look_up(resolve(self._config, self._overrides, {field: text}), field)

    def _is_none(self, field: str) -> bool:
        """Whether the config has the field, and it is None."""
        group, _, name = field.rpartition(".")
        mapping = _look_up(self.base, group) if group else self.base
        return isinstance(mapping, Mapping) and name in mapping and mapping[name] is None

    def make(self, point: Point) -> SweepRun:
        """Return the run of a point. Raises HeinsenError if the config rejects the point, or the data do not fit."""
        config = check(self._config, self._overrides, point)
        if self._check_data and (config.data, config.model) not in self._seen:
            ((dataset, _), *_) = open_split(config, TRAIN_SPLIT)
            open_split(config, config.data.validation_split, dataset.tokenizer_name)
            self._seen.add((config.data, config.model))
        return SweepRun(point, config.total_steps, config.batch_size * config.sequence_length)

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


def resolve(config: str, *overrides: Mapping[str, str]) -> dict[str, Any]:
    """Return the mapping that train.py would make of these flags. Raises SweepError, which names the flag."""
    loaded = load_config(config)
    missing = [problem for fields in overrides for field in fields if (problem := explain_missing(field, loaded))]
    if missing:
        raise SweepError(f"--{'sweep' if len(overrides) > 1 else 'config'}.{missing[0]}")
    arguments = ["sweep", f"--config={find_config(config)}"]
    arguments += [f"--config.{field}={text}" for fields in overrides for field, text in fields.items()]
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", None, "", flag_values=values, sys_argv=arguments)
    try:
        values(arguments)
        return values.config.to_dict()
    except (flags.Error, TypeError, ValueError) as error:
        problem = str(error)
    if len(overrides) > 1:
        raise SweepError(", ".join(f"--sweep.{f}={text}" for f, text in overrides[-1].items()) + f": {problem}")
    raise SweepError(f"--config: {problem}")


def check(config: str, overrides: Mapping[str, str], point: Mapping[str, Value]) -> TrainConfig:
    """Return the TrainConfig of a point. Raises SweepError."""
    texts = _texts(point)
    try:
        return from_mapping(TrainConfig, resolve(config, overrides, texts))
    except ConfigError as error:
        settings = ", ".join(f"{field}={text}" for field, text in texts.items())
        raise SweepError(f"{settings}: {error}") from error


def _texts(point: Mapping[str, Value]) -> dict[str, str]:
    """Return the flags' texts. None is the value that the config has without a flag (`RunFactory.convert`)."""
    return {field: format_value(value) for field, value in point.items() if value is not None}


def _look_up(mapping: Any, field: str) -> Any:
    """Return the value of a dotted field, or None if there is none."""
    for key in field.split("."):
        mapping = mapping.get(key) if isinstance(mapping, Mapping) else None
    return mapping
