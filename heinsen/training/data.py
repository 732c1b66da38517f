"""The training and validation batches of a run."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jax.sharding import Mesh

from heinsen.data.dataset import TokenDataset
from heinsen.data.loader import Batch, EvaluationBatches, evaluation_batches, train_iterator
from heinsen.data.mixture import bytes_per_token, open_mixture
from heinsen.data.shards import DatasetError
from heinsen.parallel import process_rows
from heinsen.training.config import TrainConfig
from heinsen.training.passes import rows_by_pass

TRAIN_SPLIT = "train"


@runtime_checkable
class BatchIterator(Protocol):
    """Endless batches whose position can be saved as JSON; Grain's iterators are such."""

    def __next__(self) -> Batch: ...

    def get_state(self) -> dict[str, Any]: ...

    def set_state(self, state: dict[str, Any]) -> None: ...


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
      rows: those of the global batch that this process reads, of `rows_by_pass`.
      digest: of all tokens, for training and validation: data of another one are other data.
      tokenizer: the name of the data's tokenizer.
      tokenizer_folder: holds its file, if it is a file.
      bytes_per_token: of the training text.
      validation: one for each dataset.
      validation_bytes_per_token: of the validation text.
    """

    batches: BatchIterator
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
        rows, length = rows_by_pass(config, mesh), config.sequence_length
        training = open_split(config, TRAIN_SPLIT)
        tokenizer = training[0][0].tokenizer_name
        batches = train_iterator(training, length, config.batch_size, config.seed, rows)
        validation = open_split(config, config.data.validation_split, tokenizer)
        names = [dataset.path.parent.name for dataset, _ in validation]
        if len(set(names)) < len(names):
            names = [str(dataset.path.parent) for dataset, _ in validation]
        per_pass = config.sequences_per_pass
        evaluated = length, per_pass, process_rows(mesh, per_pass), config.validation_tokens
        return cls(
            batches=batches,
            rows=rows,
            digest=_digest(training, validation),
            tokenizer=tokenizer,
            tokenizer_folder=training[0][0].path,
            bytes_per_token=bytes_per_token(training),
            validation=[
                ValidationSet(name, share, evaluation_batches(dataset, *evaluated))
                for name, (dataset, share) in zip(names, validation, strict=True)
            ],
            validation_bytes_per_token=bytes_per_token(validation),
        )


def _digest(*splits: list[tuple[TokenDataset, float]]) -> str:
    contents = [[(dataset.digest, share) for dataset, share in split] for split in splits]
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()[:16]


def open_split(config: TrainConfig, split: str, tokenizer: str | None = None) -> list[tuple[TokenDataset, float]]:
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
            f"model one of {config.model.vocab_size}: "
            f"set --config.model.vocab_size={dataset.vocab_size} and a padded_vocab_size of at least that"
        )
    if config.model.document_token not in (None, dataset.eot_id):
        raise DatasetError(
            f"documents of {dataset.path} begin with token {dataset.eot_id}, the model's with document_token = "
            f"{config.model.document_token}: set --config.model.document_token={dataset.eot_id} or None"
        )
    return mixture
