"""A run from its config to its last checkpoint: data, steps, validation, metrics, interruption, resumption."""

import dataclasses
import json
import math
import os
import signal
import time
from pathlib import Path

import jax

from heinsen.config import differences, from_mapping
from heinsen.data.dataset import DatasetError, TokenDataset
from heinsen.data.loader import evaluation_batches, train_iterator
from heinsen.evaluation import Evaluation, bits_per_byte, evaluate, make_eval_step
from heinsen.model import ModelConfig, Params, count_params, init_params
from heinsen.parallel import keep_host_memory, make_mesh, place_batch, replicated
from heinsen.training.checkpoint import CheckpointError, Checkpoints, restore_params, with_sharding
from heinsen.training.metrics import Console, MetricsLog, peak_flops_per_device, plot_loss, train_flops_per_token
from heinsen.training.optimizer import OptimizerConfig, make_optimizer, make_schedule
from heinsen.training.step import init_train_state, make_train_step

CONFIG_FILE = "config.json"


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Token datasets path/train_split and path/validation_split, written by scripts/prepare_data.py."""

    path: str
    tokenizer: str
    train_split: str
    validation_split: str


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """A whole run; `configs/default.py` documents the fields and holds the defaults."""

    seed: int
    total_tokens: int
    sequence_length: int
    batch_size: int
    accumulation_steps: int
    data: DataConfig
    model: ModelConfig
    optimizer: OptimizerConfig
    log_every: int
    validate_every: int
    validation_tokens: int
    checkpoint_every: int
    keep_checkpoints: int
    peak_flops: float | None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in (int, float | None) and field.name != "seed" and value is not None and not value > 0:
                raise ValueError(f"{field.name} = {value}: it must be positive")
        if self.seed < 0:
            raise ValueError(f"seed = {self.seed}: it must not be negative")
        if self.batch_size % self.accumulation_steps:
            raise ValueError(
                f"batch_size = {self.batch_size} does not divide into accumulation_steps = {self.accumulation_steps}"
            )
        make_schedule(self.optimizer, self.total_steps)  # raises where the warm-up does not fit

    @property
    def total_steps(self) -> int:
        return math.ceil(self.total_tokens / (self.batch_size * self.sequence_length))


class RunError(RuntimeError):
    """A run folder that cannot be used as asked."""


class NonFiniteLossError(RuntimeError):
    """The loss or the gradient is no longer finite."""


class RunInterrupted(Exception):
    """SIGTERM or SIGINT arrived; the run's state is saved."""


def open_split(config: TrainConfig, split: str) -> TokenDataset:
    """A split of the run's data, whose tokenizer and vocabulary must be the run's. Raises DatasetError."""
    dataset = TokenDataset(Path(config.data.path) / split)
    if dataset.tokenizer_name != config.data.tokenizer:
        raise DatasetError(
            f"{dataset.path} holds {dataset.tokenizer_name!r} tokens, the config says data.tokenizer = "
            f"{config.data.tokenizer!r}: set --config.data.tokenizer, or --config.data.path to another dataset"
        )
    if dataset.vocab_size > config.model.vocab_size:
        raise DatasetError(
            f"{dataset.path} has a vocabulary of {dataset.vocab_size} ids, the model one of {config.model.vocab_size}: "
            f"set --config.model.vocab_size={dataset.vocab_size} and a padded_vocab_size not below it"
        )
    if config.model.document_token not in (None, dataset.eot_id):
        raise DatasetError(
            f"documents of {dataset.path} begin with token {dataset.eot_id}, the model's with document_token = "
            f"{config.model.document_token}: set --config.model.document_token={dataset.eot_id} or None"
        )
    return dataset


def load_run(workdir: Path) -> TrainConfig:
    """The config of an existing run. Raises RunError."""
    path = workdir / CONFIG_FILE
    if not path.is_file():
        raise RunError(f"{workdir} is not a run folder: it has no {CONFIG_FILE}; give the --workdir of a train.py run")
    return from_mapping(TrainConfig, _read_config(path))


def _read_config(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise RunError(f"{path} is damaged ({error}): restore it, or move the run folder away") from error


def load_params(workdir: Path, model: ModelConfig, mesh: jax.sharding.Mesh) -> tuple[int, Params]:
    """(step, parameters) of a run's newest checkpoint, replicated on the mesh. Raises CheckpointError."""
    abstract = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    return restore_params(workdir, with_sharding(abstract, replicated(mesh)))


def train(config: TrainConfig, workdir: Path) -> Evaluation:
    """Run, or go on with, the run in `workdir`; returns the last validation.

    Raises DatasetError, RunError, CheckpointError before anything is written over; NonFiniteLossError and
    RunInterrupted leave a whole checkpoint to go on from.
    """
    keep_host_memory()
    mesh, main = make_mesh(), jax.process_index() == 0
    per_pass = config.batch_size // config.accumulation_steps
    if per_pass % jax.device_count():
        raise RunError(
            f"{per_pass} sequences a pass (batch_size {config.batch_size} / accumulation_steps "
            f"{config.accumulation_steps}) do not divide over {jax.device_count()} devices: change "
            "--config.batch_size or --config.accumulation_steps"
        )
    train_data, validation_data = (
        open_split(config, config.data.train_split),
        open_split(config, config.data.validation_split),
    )
    train_bytes_per_token = train_data.num_bytes / train_data.num_tokens
    batches = train_iterator(
        train_data,
        config.sequence_length,
        config.batch_size // jax.process_count(),
        config.seed,
        jax.process_index(),
        jax.process_count(),
    )
    optimizer = make_optimizer(config.optimizer, config.total_steps)
    schedule = make_schedule(config.optimizer, config.total_steps)
    train_step = make_train_step(config.model, optimizer, mesh)
    eval_step = make_eval_step(config.model, mesh)
    validation = evaluation_batches(
        validation_data,
        config.sequence_length,
        per_pass // jax.process_count(),
        jax.process_index(),
        jax.process_count(),
        max_tokens=config.validation_tokens,
    )

    _claim_folder(config, workdir, main)
    with Checkpoints(workdir, config.keep_checkpoints) as checkpoints, _Signals() as signals:
        start_step = checkpoints.latest or 0
        if start_step == 0 and any(path.name.isdigit() for path in checkpoints.directory.iterdir()):
            raise CheckpointError(
                f"{checkpoints.directory} holds no whole checkpoint to resume from, only remains: restore one, or "
                "move the folder away to start from the beginning"
            )
        initialise = lambda: init_train_state(config.model, optimizer, config.seed, mesh)
        if start_step:
            abstract = with_sharding(jax.eval_shape(initialise), replicated(mesh))
            state = checkpoints.restore(start_step, abstract, batches)
        else:
            state = initialise()
        n_params = count_params(state.params)
        log = MetricsLog(workdir, start_step) if main else None
        console = Console(workdir.name, start_step, config.total_steps, main)
        console.message(
            f"{n_params:,} parameters on {jax.device_count()} x {jax.devices()[0].device_kind}; "
            f"{config.total_steps:,} steps of {config.batch_size} x {config.sequence_length} tokens; "
            + (f"resuming after step {start_step}" if start_step else f"run folder {workdir}")
        )
        peak_flops = (config.peak_flops or peak_flops_per_device()) * jax.device_count()

        def validate(step: int) -> Evaluation:
            result = evaluate(
                eval_step, state.params, validation, mesh, validation_data.num_bytes / validation_data.num_tokens
            )
            if not math.isfinite(result.loss):
                raise NonFiniteLossError(_non_finite(step, f"validation loss {result.loss}", checkpoints))
            return result

        def report(step: int, metrics: dict[str, float]) -> None:
            metrics = {"tokens": step * config.batch_size * config.sequence_length, **metrics}
            if log is not None:
                log.write(step, metrics)
            console.report(step, metrics)

        try:
            result, logged_step, logged_time = None, start_step, time.perf_counter()
            for step in range(start_step + 1, config.total_steps + 1):
                tokens = next(batches)["tokens"].reshape(config.accumulation_steps, -1, config.sequence_length + 1)
                state, metrics = train_step(state, place_batch(mesh, {"tokens": tokens}, axis=1)["tokens"])
                loss, grad_norm = float(metrics["loss"]), float(metrics["grad_norm"])  # waits for the step
                if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                    raise NonFiniteLossError(
                        _non_finite(step, f"loss {loss} and gradient norm {grad_norm}", checkpoints)
                    )
                console.update(step)
                if step % config.log_every == 0 or step == config.total_steps:
                    seconds, logged_time = time.perf_counter() - logged_time, time.perf_counter()
                    rate = (step - logged_step) * config.batch_size * config.sequence_length / seconds
                    logged_step = step
                    measured = {
                        "loss": loss,
                        "bits_per_byte": bits_per_byte(loss, train_bytes_per_token),
                        "learning_rate": float(schedule(step - 1)),
                        "grad_norm": grad_norm,
                        "tokens_per_second": rate,
                        "mfu": rate * train_flops_per_token(n_params) / peak_flops,
                    }
                    report(step, measured)
                result = None
                if step % config.validate_every == 0 or step == config.total_steps:
                    pause = time.perf_counter()
                    result = validate(step)
                    report(step, {"validation_loss": result.loss, "validation_bits_per_byte": result.bits_per_byte})
                    logged_time += time.perf_counter() - pause
                if step % config.checkpoint_every == 0 or step == config.total_steps or signals.received:
                    checkpoints.save(step, state, batches)
                if signals.received:
                    checkpoints.wait()
                    raise RunInterrupted(
                        f"{signals.received} at step {step}: saved {checkpoints.path(step)}; the same command resumes"
                    )
            return result or validate(config.total_steps)
        finally:
            console.close()
            if log is not None:
                log.close()
                plot_loss(workdir)


def _claim_folder(config: TrainConfig, workdir: Path, main: bool) -> None:
    """Write config.json into a new run folder, or check that the run there has this config."""
    path, mapping = workdir / CONFIG_FILE, dataclasses.asdict(config)
    if path.exists():
        if lines := differences(_read_config(path), mapping):
            raise RunError(
                f"{workdir} holds a run with another config:\n  " + "\n  ".join(lines) + "\n"
                "Give another --workdir, or the run's own config to resume it."
            )
    elif main:
        workdir.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(mapping, indent=2) + "\n")
        os.replace(temporary, path)


def _non_finite(step: int, what: str, checkpoints: Checkpoints) -> str:
    newest = checkpoints.latest
    good = f"the last good checkpoint is {checkpoints.path(newest)}" if newest else "there is no checkpoint yet"
    return (
        f"{what} at step {step}: stopped, nothing of it is saved; {good}. Lower "
        "--config.optimizer.learning_rate, or look at the data of that step."
    )


class _Signals:
    """Notes the first SIGTERM or SIGINT, for the loop to stop at a step's end; a second one takes effect at once."""

    def __init__(self):
        self.received: str | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "_Signals":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame) -> None:
        self.received = signal.Signals(number).name
        self.__exit__()
