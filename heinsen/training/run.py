"""A run's config, its folder, and checks of its data and mesh against the config."""

import contextlib
import dataclasses
import errno
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import jax
from jax.sharding import Mesh

from heinsen.config import (
    ConfigError,
    Setting,
    check_numbers,
    differences,
    from_mapping,
    read_json_object,
)
from heinsen.data.dataset import DatasetError, TokenDataset
from heinsen.data.mixture import open_mixture
from heinsen.distributed import first_reason
from heinsen.errors import HeinsenError, print_warning
from heinsen.export import ExportError, is_export, read_manifest
from heinsen.files import LockedError, hold_lock, write_atomically
from heinsen.models import ModelConfig, check_halo
from heinsen.parallel import MeshConfig, MeshError, n_batch_parts
from heinsen.training.optimizer import OptimizerConfig, make_schedule

CONFIG_FILE, LOCK_FILE = "config.json", "run.lock"

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of flock, on a file system without locks

# Fields that may change when a run resumes: they concern the machine, or what is reported and saved.
_CHANGEABLE = (
    "mesh", "accumulation_steps", "model.remat", "log_every", "validate_every", "validation_tokens",
    "log_activations", "sample_tokens", "checkpoint_every", "keep_checkpoints", "keep_every", "stop_after_skipped",
    "spike_sigmas", "trace_steps", "wandb_project", "peak_flops",
)  # fmt: skip

# Fields of a model that do not affect what its weights mean, with a value to compare models at.
_WEIGHT_INDEPENDENT = {"dtype": "float32", "remat": "none", "implementation": None, "document_token": None}


class RunError(HeinsenError, RuntimeError):
    """A run folder or a setting of a run that cannot be used."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Token datasets PATH/train_split and PATH/validation_split, written by scripts/prepare_data.py.

    path is one folder, or several with their shares, as in A:0.7,B:0.3 (`heinsen.data.mixture`).
    """

    path: str
    tokenizer: str
    train_split: str
    validation_split: str


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The config of a run; `configs/default.py` documents the fields and holds the defaults."""

    seed: Annotated[int, Setting(at_least=0)]
    init_from: str | None
    total_tokens: int
    sequence_length: Annotated[int, Setting(below=2**31)]
    batch_size: Annotated[int, Setting(below=2**31)]
    accumulation_steps: int
    carry_state: bool
    mesh: MeshConfig
    data: DataConfig
    model: ModelConfig
    optimizer: OptimizerConfig
    log_every: int
    validate_every: int
    validation_tokens: int
    log_activations: bool
    sample_tokens: Annotated[int, Setting(at_least=0)]
    checkpoint_every: int
    keep_checkpoints: int
    keep_every: int | None
    stop_after_skipped: int
    spike_sigmas: float | None
    trace_steps: str | None
    wandb_project: str | None
    peak_flops: float | None

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.batch_size % self.accumulation_steps:
            raise ValueError(
                f"batch_size = {self.batch_size} does not divide into accumulation_steps = {self.accumulation_steps}"
            )
        n_positions = self.model.n_positions
        if self.model.position == "learned" and n_positions is not None and self.sequence_length > n_positions:
            raise ValueError(
                f"sequence_length = {self.sequence_length} is longer than model.n_positions = "
                f"{n_positions}: raise it, or shorten the sequences"
            )
        if self.sample_tokens:
            check_samples(self.model, self.sample_tokens)
        if self.carry_state:
            check_carries(self.model)
        make_schedule(self.optimizer, self.total_steps)  # raises if the warm-up does not fit
        if self.traced is not None and not 1 <= self.traced.start < self.traced.stop:
            raise ValueError(f"trace_steps = {self.trace_steps!r}: expected FIRST:LAST, such as 10:12")

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.sequence_length

    @property
    def total_steps(self) -> int:
        return -(-self.total_tokens // self.tokens_per_step)

    @property
    def sequences_per_pass(self) -> int:
        return self.batch_size // self.accumulation_steps

    @property
    def carry_rows(self) -> int | None:
        """Rows of a batch whose state goes on to the next one's; None: no state does."""
        return self.batch_size if self.carry_state else None

    @property
    def traced(self) -> range | None:
        """The steps that trace_steps names; an empty range if they cannot be parsed."""
        if self.trace_steps is None:
            return None
        first, _, last = self.trace_steps.partition(":")
        return range(int(first), int(last) + 1) if first.isdecimal() and last.isdecimal() else range(0)

    @property
    def fingerprint(self) -> str:
        """A digest of all fields that may not change: a checkpoint with another one belongs to another run."""
        identity = _identity(dataclasses.asdict(self))
        text = json.dumps(identity, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _identity(mapping: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return a config without the fields that may change."""
    return {
        name: _identity(value, f"{path}{name}.") if isinstance(value, Mapping) else value
        for name, value in mapping.items()
        if path + name not in _CHANGEABLE
    }


def check_samples(model: ModelConfig, sample_tokens: int) -> None:
    """Raise ValueError if the model cannot write a document of so many tokens."""
    if not model.causal:
        raise ValueError(
            f"sample_tokens = {sample_tokens}: a model with model.objective = {model.objective!r} predicts no next "
            "token; set it to 0"
        )
    if model.max_positions is not None and sample_tokens >= model.max_positions:
        raise ValueError(
            f"sample_tokens = {sample_tokens} and a document's beginning go beyond model.n_positions = "
            f"{model.n_positions}: ask for fewer"
        )


def check_carries(model: ModelConfig) -> None:
    """Raise ValueError if the model has no state of constant size to carry on from batch to batch."""
    carried = "carry_state = True carries a state of constant size on through texts without an end"
    if not model.causal:
        raise ValueError(f"{carried}; model.objective = {model.objective!r} reads whole windows: set it to next_token")
    if model.has_cache:
        raise ValueError(
            f"{carried}; model.attention = {model.attention!r} has layers that keep every token: choose kinds without "
            "a cache, such as heinsen"
        )
    if model.max_positions is not None:
        raise ValueError(
            f"{carried}; model.position = {model.position!r} ends after n_positions = {model.n_positions} tokens: "
            "choose recurrent or none"
        )


def check_mesh(config: TrainConfig, mesh: Mesh) -> None:
    """Raise MeshError if the mesh does not divide the batch, the heads or the tokens, or the model forbids it."""
    shape = mesh.shape
    if config.sequences_per_pass % n_batch_parts(mesh):
        raise MeshError(
            f"{config.sequences_per_pass} sequences per pass (batch_size {config.batch_size} / accumulation_steps "
            f"{config.accumulation_steps}) do not divide over {n_batch_parts(mesh)} devices (mesh.data "
            f"{shape['data']} x mesh.fsdp {shape['fsdp']}): change --config.batch_size, "
            "--config.accumulation_steps or --config.mesh"
        )
    if config.model.n_heads % shape["tensor"]:
        raise MeshError(f"model.n_heads = {config.model.n_heads} do not divide over mesh.tensor = {shape['tensor']}")
    if shape["sequence"] > 1 and not config.model.splits_sequences:
        raise MeshError(
            f"mesh.sequence = {shape['sequence']} divides the tokens of a sequence, which needs model.attention = "
            "heinsen in all layers, model.value_domain = log and model.objective = next_token: they are "
            f"{config.model.attention}, {config.model.value_domain} and {config.model.objective}. Use the mesh's other "
            "axes"
        )
    check_halo(mesh, config.sequence_length, config.model.convolution)
    parts = shape["sequence"] * shape["tensor"]  # the loss divides tokens over both
    if config.sequence_length % parts:
        raise MeshError(
            f"sequence_length = {config.sequence_length} does not divide into {parts} parts (mesh.sequence "
            f"{shape['sequence']} x mesh.tensor {shape['tensor']})"
        )


def open_split(config: TrainConfig, split: str) -> list[tuple[TokenDataset, float]]:
    """Open a split of every dataset of the run's data; return the datasets with their shares, in order.

    Raises DatasetError if one is missing, damaged, or of another tokenizer or vocabulary than the run's.
    """
    mixture = open_mixture(config.data.path, split)
    for dataset, _ in mixture:
        _check_dataset(config, dataset)
    return mixture


def _check_dataset(config: TrainConfig, dataset: TokenDataset) -> None:
    if dataset.tokenizer_name != config.data.tokenizer:
        raise DatasetError(
            f"{dataset.path} holds {dataset.tokenizer_name!r} tokens, the config says data.tokenizer = "
            f"{config.data.tokenizer!r}: set --config.data.tokenizer, or --config.data.path to another dataset"
        )
    if dataset.vocab_size > config.model.vocab_size:
        raise DatasetError(
            f"{dataset.path} has a vocabulary of {dataset.vocab_size} ids, the model one of {config.model.vocab_size}: "
            f"set --config.model.vocab_size={dataset.vocab_size} and a padded_vocab_size of at least that"
        )
    if config.model.document_token not in (None, dataset.eot_id):
        raise DatasetError(
            f"documents of {dataset.path} begin with token {dataset.eot_id}, the model's with document_token = "
            f"{config.model.document_token}: set --config.model.document_token={dataset.eot_id} or None"
        )


def load_run(workdir: Path) -> TrainConfig:
    """Return the config of the run in `workdir`, or of the run whose weights scripts/export.py wrote there.

    Raises RunError where there is none, or it is damaged.
    """
    try:
        config = read_manifest(workdir).run if is_export(workdir) else _read_config(workdir)
    except ExportError as error:
        raise RunError(str(error)) from error
    if config is None:
        raise RunError(
            f"{workdir} is not a run folder: it has no {CONFIG_FILE}; give the --workdir of a train.py run, or the "
            "--out of scripts/export.py"
        )
    try:
        return from_mapping(TrainConfig, config, f"{workdir / CONFIG_FILE}: config")
    except ConfigError as error:
        raise RunError(f"{error}. Restore the file, or use the version of heinsen that wrote it") from error


def check_same_model(old: ModelConfig, new: ModelConfig, source: Path) -> None:
    """Raise RunError with the differences if the model in `source`, `old`, cannot share its weights with `new`."""
    comparable = lambda model: {"model": dataclasses.asdict(dataclasses.replace(model, **_WEIGHT_INDEPENDENT))}
    if lines := differences(comparable(old), comparable(new)):
        raise RunError(f"{source} holds the weights of another model:\n  " + "\n  ".join(lines))


def _read_config(workdir: Path) -> dict[str, Any] | None:
    """Return the contents of config.json, None if there is none. Raises RunError."""
    try:
        return read_json_object(workdir / CONFIG_FILE)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ConfigError as error:
        raise RunError(f"{error}: restore it, or give another folder") from error


@contextlib.contextmanager
def claim_folder(config: TrainConfig, workdir: Path) -> Iterator[list[str]]:
    """Hold a run folder, which one run at a time may write; create it, or check that the run in it has this config.

    All processes of a run call it together; the first one holds the lock.

    Yields:
      A line for each field that differs and may; `write_config` then records the new values.

    Raises:
      RunError: another process holds it, other fields differ, or the folder cannot be written.
    """
    changes = _find_changes(config, workdir)  # a folder of something else is not even locked
    with contextlib.ExitStack() as stack:
        reason = None
        if jax.process_index() == 0:
            try:
                stack.enter_context(_lock(workdir))
                changes = _find_changes(config, workdir)  # again, as it may have waited for the lock
                if not (workdir / CONFIG_FILE).exists():
                    write_config(config, workdir)
            except RunError as error:
                reason = str(error)
        if (reason := first_reason(reason)) is not None:
            raise RunError(reason)
        yield changes


@contextlib.contextmanager
def _lock(workdir: Path) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        try:
            workdir.mkdir(parents=True, exist_ok=True)
            stack.enter_context(hold_lock(workdir / LOCK_FILE))
        except LockedError as error:
            raise RunError(
                f"{workdir} belongs to a run in progress ({error}): wait for it or stop it, or give another --workdir. "
                f"If that machine is down, remove {workdir / LOCK_FILE}"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise _unwritable(workdir, error) from error
            print_warning(f"{workdir} is on a file system without locks: make sure that no other process trains there")
        yield


def _find_changes(config: TrainConfig, workdir: Path) -> list[str]:
    """Describe the fields that differ from those of the run in the folder, if there is one. Raises RunError."""
    if is_export(workdir):
        raise RunError(
            f"{workdir} holds exported weights: give a --workdir of its own, and --config.init_from={workdir} to start "
            "from them"
        )
    old, new = _read_config(workdir), dataclasses.asdict(config)
    if old is None:
        return []
    if lines := differences(_identity(old), _identity(new)):
        raise RunError(
            f"{workdir} holds a run with another config:\n  " + "\n  ".join(lines) + "\n"
            "Give another --workdir, or the run's own config to resume it."
        )
    return differences(old, new)


def write_config(config: TrainConfig, workdir: Path) -> None:
    """Write config.json, creating the folder if needed. Raises RunError."""
    path = workdir / CONFIG_FILE
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(dataclasses.asdict(config), indent=2) + "\n")
    except OSError as error:
        raise _unwritable(workdir, error) from error


def _unwritable(workdir: Path, error: OSError) -> RunError:
    return RunError(f"{workdir} cannot be written: {error}. Give another --workdir, or free some space there")
