"""A run from its config to its last checkpoint: data, steps, validation, interruption, resumption."""

import dataclasses
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from heinsen.data.loader import EvaluationBatches, evaluation_batches, train_iterator
from heinsen.data.mixture import bytes_per_token
from heinsen.errors import HeinsenError
from heinsen.evaluation.loss import (
    Evaluation,
    bits_per_byte,
    evaluate,
    make_activation_step,
    make_eval_step,
    mean_of_mixture,
)
from heinsen.models import ModelConfig, Params, count_params, masked_loss, mean_loss
from heinsen.models.masking import mask_tokens
from heinsen.parallel import (
    keep_host_memory,
    make_mesh,
    place_batch,
    process_rows,
)
from heinsen.training.checkpoint import Checkpoints, has_checkpoints
from heinsen.training.optimizer import make_optimizer
from heinsen.training.report import Reporter
from heinsen.training.run import (
    RunError,
    TrainConfig,
    check_mesh,
    claim_folder,
    open_split,
    write_config,
)
from heinsen.training.step import abstract_train_state, init_train_state, make_train_step
from heinsen.weights import load_initial_params


class NonFiniteLossError(HeinsenError, RuntimeError):
    """The loss or the gradient is no longer finite."""


class RunInterrupted(Exception):
    """SIGTERM, SIGINT or a preemption notice arrived; the run's state is saved."""


def train(config: TrainConfig, workdir: Path) -> Evaluation:
    """Run, or go on with, the run in `workdir`; returns the last validation.

    Raises DatasetError, MeshError, RunError, CheckpointError before anything is written over. Later NonFiniteLossError,
    RunInterrupted, RunError and CheckpointError (a folder that cannot be written any more) and DatasetError (data that
    cannot be read any more) leave whole checkpoints to go on from.
    """
    keep_host_memory()
    mesh, main = make_mesh(config.mesh), jax.process_index() == 0
    check_mesh(config, mesh)
    data = _Data.open(config, mesh)
    optimizer = make_optimizer(config.optimizer, config.total_steps)
    abstract = abstract_train_state(config.model, optimizer, mesh)
    initial = None  # read before anything is written; a run that is resumed has its own
    if config.init_from is not None and not has_checkpoints(workdir):
        initial = load_initial_params(config, mesh)
    changes = claim_folder(config, workdir, write=main)
    with Checkpoints(workdir, config.keep_checkpoints, config.keep_every) as checkpoints, _Signals() as signals:
        restored = checkpoints.restore_newest(abstract, config.fingerprint)
        if restored is None:
            start_step, state = 0, init_train_state(config.model, optimizer, config.seed, mesh)
            if initial is not None:
                state = state._replace(params=initial[1])
        else:
            start_step, state, position = restored
            data.batches.set_state(position)
        if changes and main:
            write_config(config, workdir)
        n_params = count_params(state.params)
        try:
            with Reporter(config, workdir, start_step, n_params, main) as reporter:
                reporter.message(
                    f"{n_params:,} parameters on {jax.device_count()} x {jax.devices()[0].device_kind}; "
                    f"{config.total_steps:,} steps of {config.batch_size} x {config.sequence_length} tokens; "
                    + (f"resuming after step {start_step}" if start_step else f"run folder {workdir}")
                )
                if initial is not None:
                    reporter.message(f"starting from the parameters of {config.init_from} after step {initial[0]}")
                for change in changes:
                    reporter.message(f"{change}: going on with the command's")
                step = make_train_step(config.model, optimizer, mesh, loss_of(config.model))
                return _Loop(config, mesh, data, step, checkpoints, signals, reporter).run(state, start_step)
        except OSError as error:
            raise RunError(
                f"{workdir} cannot be written: {error}. Make room there; the same command goes on from "
                f"{_newest(checkpoints)}"
            ) from error


def loss_of(model: ModelConfig) -> Callable[..., jax.Array]:
    """The function for `make_train_step` to minimise, of the batches that `passes` makes."""
    return mean_loss if model.causal else masked_loss


def passes(config: TrainConfig, tokens: np.ndarray, step: int, rows: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays [A, R, ...] of a step's A accumulation passes from its windows [A R, T + 1].

    rows: the places of the windows in the global batch. A masked model reads, and fills in, what others predict.
    """
    arrays = {"tokens": tokens}
    if not config.model.causal:
        arrays = mask_tokens(config.model, tokens[:, 1:], config.seed, step, rows)
    return {name: x.reshape(config.accumulation_steps, -1, x.shape[-1]) for name, x in arrays.items()}


def as_batch(config: TrainConfig, arrays: dict[str, Any]) -> Any:
    """What `loss_of` takes of them: the tokens alone, but for a masked model."""
    return arrays["tokens"] if config.model.causal else arrays


@dataclasses.dataclass(frozen=True)
class _Data:
    """What a run reads, this process's rows of it."""

    batches: Any  # training batches for ever, a Grain iterator
    rows: np.ndarray  # of the global batch, those read here
    bytes_per_token: float  # of the training text
    validation: list[tuple[str, float, EvaluationBatches]]  # of each dataset: its name, share and batches
    validation_bytes_per_token: float

    @classmethod
    def open(cls, config: TrainConfig, mesh: Mesh) -> "_Data":
        """Raises DatasetError."""
        per_pass = config.sequences_per_pass
        rows = process_rows(mesh, per_pass)
        of_batch = np.concatenate([first + rows for first in range(0, config.batch_size, per_pass)])
        training = open_split(config, config.data.train_split)
        validation = open_split(config, config.data.validation_split)
        names = [dataset.path.parent.name for dataset, _ in validation]
        if len(set(names)) < len(names):
            names = [str(dataset.path.parent) for dataset, _ in validation]
        return cls(
            train_iterator(training, config.sequence_length, config.batch_size, config.seed, rows=of_batch),
            of_batch,
            bytes_per_token(training),
            [
                (
                    name,
                    share,
                    evaluation_batches(dataset, config.sequence_length, per_pass, rows, config.validation_tokens),
                )
                for name, (dataset, share) in zip(names, validation, strict=True)
            ],
            bytes_per_token(validation),
        )


class _Loop:
    """The steps of a run.

    The numbers of a step are fetched while the next one runs, and the batch after that is made meanwhile: the device
    does not wait for Python. Only to save or to validate the loop waits for the step itself.
    """

    def __init__(self, config, mesh, data, train_step, checkpoints, signals, reporter):
        self.config, self.mesh, self.data = config, mesh, data
        self.train_step, self.eval_step = train_step, make_eval_step(config.model, mesh)
        self.activation_step = make_activation_step(config.model, mesh) if config.log_activations else None
        self.checkpoints, self.signals, self.reporter = checkpoints, signals, reporter
        # Simulated devices that share a few cores deadlock in collectives when steps queue up.
        self.always_waits = jax.default_backend() == "cpu" and jax.device_count() > 1

    def run(self, state, start_step: int) -> Evaluation:
        c, result, pending = self.config, None, None
        for step in range(start_step + 1, c.total_steps + 1):
            self.reporter.before(step)
            with self.reporter.waiting_for_data():
                arrays = passes(c, next(self.data.batches)["tokens"], step, self.data.rows)
                placed = place_batch(self.mesh, arrays, axis=1)
            state, metrics = self.train_step(state, as_batch(c, placed))
            if pending is not None:
                self.look_at(*pending)
            last, stopping = step == c.total_steps, self.signals.stop_after(step)
            saves = step % c.checkpoint_every == 0 or last or stopping
            validates = step % c.validate_every == 0 or last
            pending, result = (step, metrics), None
            if saves or validates or self.always_waits or self.reporter.ends_trace(step):
                self.look_at(*pending)
                pending = None
            if validates:
                result, metrics = self.validate(step, state.params)
                self.reporter.validation(step, metrics)
            if saves:
                with self.reporter.pause():
                    self.checkpoints.save(step, state, self.data.batches.get_state(), c.fingerprint)
            if stopping and not last:
                self.checkpoints.wait()
                raise RunInterrupted(
                    f"{stopping} at step {step}: saved {self.checkpoints.path(step)}; the same command resumes"
                )
        self.checkpoints.wait()
        return result or self.validate(c.total_steps, state.params)[0]

    def look_at(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Report a step. Raises NonFiniteLossError: too many skipped in a row, or parameters not finite."""
        metrics = {name: x.item() for name, x in jax.device_get(metrics).items()}
        in_a_row = metrics.pop("skipped_in_a_row")
        if not math.isfinite(metrics["param_norm"]):
            raise NonFiniteLossError(
                f"parameters are no longer finite at step {step}: loss {metrics['loss']}, gradient norm "
                f"{metrics['grad_norm']}. Stopped, nothing of it is saved. {self.advice()}"
            )
        if in_a_row:
            what = f"loss {metrics['loss']} and gradient norm {metrics['grad_norm']} at step {step}"
            if in_a_row >= self.config.stop_after_skipped:
                raise NonFiniteLossError(
                    f"{what}: stopped after {in_a_row} such steps in a row (stop_after_skipped), which changed no "
                    f"parameter. {self.advice()}"
                )
            self.reporter.message(f"{what}: skipped, {in_a_row} in a row, {metrics['skipped']} in all")
        metrics["updates"] = step - 1 - metrics["skipped"] + (in_a_row > 0)
        metrics["bits_per_byte"] = bits_per_byte(metrics["loss"], self.data.bytes_per_token)
        self.reporter.step(step, metrics)

    def advice(self) -> str:
        return (
            f"Go back to {_newest(self.checkpoints)} with a lower --config.optimizer.learning_rate, or look at the "
            "data of these steps."
        )

    def validate(self, step: int, params: Params) -> tuple[Evaluation, dict[str, float]]:
        """The mean over the datasets by their shares, and the metrics to report. Raises NonFiniteLossError."""
        with self.reporter.pause():
            parts = {
                name: (share, evaluate(self.eval_step, params, batches, self.mesh, batches.dataset.bytes_per_token))
                for name, share, batches in self.data.validation
            }
            activations = self.activations(params) if self.activation_step is not None else {}
        result = mean_of_mixture(list(parts.values()), self.data.validation_bytes_per_token)
        if not math.isfinite(result.loss):
            raise NonFiniteLossError(
                f"validation loss {result.loss} at step {step}. Stopped, nothing of it is saved. {self.advice()}"
            )
        metrics = {"validation_loss": result.loss, "validation_bits_per_byte": result.bits_per_byte}
        if len(parts) > 1:
            metrics |= {f"validation_loss/{name}": part.loss for name, (_, part) in parts.items()}
        return result, metrics | activations

    def activations(self, params: Params) -> dict[str, float]:
        """The metrics that `log_activations` asks for, of the first batch of validation, of the first dataset."""
        _, _, batches = self.data.validation[0]
        tokens = place_batch(self.mesh, {"tokens": next(iter(batches))["tokens"]})["tokens"]
        found = jax.device_get(self.activation_step(params, tokens))
        return {f"{name}_rms/layer_{i}": float(x) for name, of_layers in found.items() for i, x in enumerate(of_layers)}


def _newest(checkpoints: Checkpoints) -> str:
    newest = checkpoints.latest
    return "the beginning, as there is no checkpoint yet" if newest is None else str(checkpoints.path(newest))


class _Signals:
    """Asks for a stop at a step's end, the same step in every process: SIGTERM, SIGINT, a cluster's preemption notice.

    A second SIGINT takes effect at once. A second SIGTERM does nothing: SLURM may send it to a job more than once.
    """

    def __init__(self):
        self.received: str | None = None
        self._previous: dict[int, Any] = {}
        self._alone = jax.process_count() == 1

    def __enter__(self) -> "_Signals":
        # With several processes JAX's preemption service takes SIGTERM and tells all of them.
        for number in (signal.SIGTERM, signal.SIGINT) if self._alone else (signal.SIGINT,):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in list(self._previous.items()):
            signal.signal(number, handler)

    def stop_after(self, step: int) -> str | None:
        """What asks to stop after this step; to be called once a step, in every process."""
        if self._alone:
            return self.received
        return "a request to stop" if multihost_utils.reached_preemption_sync_point(step) else None

    def _handle(self, number: int, _frame) -> None:
        self.received = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(number, self._previous.pop(number))
        if not self._alone:
            os.kill(os.getpid(), signal.SIGTERM)
