"""The training and validation batches of a run, and the microbatches in which a step accumulates gradients.

A microbatches of R rows that this process reads, M = A R rows, N tokens of a window.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from heinsen.config import from_mapping
from heinsen.data.loader import Batch, EvaluationBatches, train_iterator
from heinsen.data.mixture import Mixture, bytes_per_token, open_mixture
from heinsen.data.shards import DatasetError
from heinsen.models.masking import mask_tokens
from heinsen.parallel import process_rows
from heinsen.training.config import TrainConfig
from heinsen.training.conversion import draw_first_places, take_from_teacher

TRAIN_SPLIT = "train"


def train_config(values: Mapping[str, Any]) -> TrainConfig:
    """Return the config of a run from the fields of a config file.

    model.vocab_size may be None: the data's. model.padded_vocab_size may be None: as in `pad_vocabulary`, with a row
    for masked tokens if the model needs one. In a conversion any field of the model may be None (`take_from_teacher`).
    Raises ConfigError, RunError, and DatasetError if the data are needed and missing.
    """
    values = take_from_teacher(values)
    match values:
        case {"model": {"vocab_size": None} as model, "data": {"path": str(path)}}:
            values = {**values, "model": {**model, "vocab_size": _read_vocab_size(path)}}
    match values:
        case {"model": {"vocab_size": int(size), "padded_vocab_size": None, "objective": objective} as model}:
            padded = pad_vocabulary(size + (objective == "masked"))
            values = {**values, "model": {**model, "padded_vocab_size": padded}}
    return from_mapping(TrainConfig, values)


def pad_vocabulary(size: int) -> int:
    """Return the next multiple of 128, or of 8 for less than 4,096 ids: devices divide it, and compute it faster."""
    multiple = 128 if size >= 4096 else 8
    return -(-size // multiple) * multiple


def _read_vocab_size(path: str) -> int:
    try:
        return open_mixture(path, TRAIN_SPLIT)[0][0].vocab_size
    except DatasetError as error:
        raise DatasetError(f"{error}. To plan without it, give --config.model.vocab_size") from error


class ValidationSet(NamedTuple):
    """Validation batches of one dataset, with its share of the mixture."""

    name: str
    share: float
    batches: EvaluationBatches


@dataclasses.dataclass(frozen=True)
class RunData:
    """The data of a run, of which this process reads some rows.

    Attributes:
      batches: training batches.
      rows: those of the global batch that this process reads, of `rows_by_microbatch`.
      digest: of all tokens, for training and validation: data of another one are other data.
      tokenizer: the name of the data's tokenizer.
      tokenizer_folder: holds its file, if it is a file.
      bytes_per_token: of the training text.
      validation: one for each dataset.
      validation_bytes_per_token: of the validation text.
    """

    batches: grain.DatasetIterator[Batch]
    rows: np.ndarray
    digest: str
    tokenizer: str
    tokenizer_folder: Path
    bytes_per_token: float
    validation: list[ValidationSet]
    validation_bytes_per_token: float

    @classmethod
    def open(cls, config: TrainConfig, mesh: Mesh) -> "RunData":
        """Open the data that `config` names. Raises DatasetError."""
        rows, length = rows_by_microbatch(config, mesh), config.sequence_length
        training, validation = open_splits(config)
        batches = train_iterator(training, length, config.batch_size, config.seed, rows)
        names = [dataset.path.parent.name for dataset, _ in validation]
        if len(set(names)) < len(names):
            names = [str(dataset.path.parent) for dataset, _ in validation]
        at_a_time = config.sequences_per_microbatch
        evaluated = length, at_a_time, process_rows(mesh, at_a_time), config.validation_tokens
        return cls(
            batches=batches,
            rows=rows,
            digest=digest_data(training, validation),
            tokenizer=training[0][0].tokenizer_name,
            tokenizer_folder=training[0][0].path,
            bytes_per_token=bytes_per_token(training),
            validation=[
                ValidationSet(name, share, EvaluationBatches(dataset, *evaluated))
                for name, (dataset, share) in zip(names, validation, strict=True)
            ],
            validation_bytes_per_token=bytes_per_token(validation),
        )


def rows_by_microbatch(config: TrainConfig, mesh: Mesh) -> Int[np.ndarray, " M"]:
    """Return the rows of the global batch that this process reads, in ascending order: microbatch by microbatch."""
    firsts = np.arange(0, config.batch_size, config.sequences_per_microbatch)
    return (firsts[:, None] + process_rows(mesh, config.sequences_per_microbatch)).reshape(-1)


def make_microbatches(
    config: TrainConfig, windows: Int[np.ndarray, "M N"], step: int, rows: Int[np.ndarray, " M"]
) -> Any:
    """Return the batches [A, R, ...] that the loss of the model's objective reads in a step.

    They are the windows, for a masked model the arrays of `mask_tokens`, in a conversion the windows and the places of
    their first tokens.

    Args:
      windows: tokens of these rows.
      step: masks and places depend on it.
      rows: as returned by `rows_by_microbatch`.
    """
    model = config.model
    batch: Any = windows if model.causal else mask_tokens(model, windows[:, 1:], config.seed, step, rows)
    if config.conversion.share is not None:
        batch = {"tokens": windows, "first_place": draw_first_places(config, step, rows)}
    return jax.tree.map(lambda x: x.reshape(config.accumulation_steps, -1, *x.shape[1:]), batch)


def digest_data(*splits: Mixture) -> str:
    """Return the digest of all tokens of the splits, in order."""
    contents = [[(dataset.digest, share) for dataset, share in split] for split in splits]
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()[:16]


def open_splits(config: TrainConfig) -> tuple[Mixture, Mixture]:
    """Open the training and the validation split of the run's data. Raises DatasetError, as `open_split`."""
    training = open_split(config, TRAIN_SPLIT)
    return training, open_split(config, config.data.validation_split, training[0][0].tokenizer_name)


def open_split(config: TrainConfig, split: str, tokenizer: str | None = None) -> Mixture:
    """Open a split of every dataset of the run's data; return the datasets with their shares, in order.

    Raises DatasetError if one is missing, damaged, of another tokenizer than `tokenizer` (None: any), or of a
    vocabulary that does not fit the model's.
    """
    mixture = open_mixture(config.data.path, split)
    dataset = mixture[0][0]  # the others have the same tokenizer and vocabulary
    if tokenizer not in (None, dataset.tokenizer_name):
        raise DatasetError(
            f"{dataset.path} holds {dataset.tokenizer_name!r} tokens, the run reads {tokenizer!r}: prepare it with "
            "that tokenizer, or set --config.data.path to another dataset"
        )
    if dataset.vocab_size > config.model.vocab_size:
        raise DatasetError(
            f"{dataset.path} has {dataset.tokenizer_name!r} tokens, a vocabulary of {dataset.vocab_size} ids, the "
            f"model one of {config.model.vocab_size}: set --config.model.vocab_size=None and "
            "--config.model.padded_vocab_size=None, which take the data's"
        )
    if config.model.document_token not in (None, dataset.eot_id):
        raise DatasetError(
            f"documents of {dataset.path} begin with token {dataset.eot_id}, the model's with document_token = "
            f"{config.model.document_token}: set --config.model.document_token={dataset.eot_id} or None"
        )
    return mixture
