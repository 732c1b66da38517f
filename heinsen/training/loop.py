"""A run from its config to its last checkpoint: data, steps, validation, interruption, resumption."""

import contextlib
import dataclasses
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from tqdm import tqdm

from heinsen.data.tokenizer import read_tokenizer_file, write_tokenizer_file
from heinsen.errors import HeinsenError, Interruption, describe
from heinsen.evaluation.loss import Evaluation
from heinsen.host import keep_host_memory
from heinsen.models import Params, count_params
from heinsen.parallel import make_mesh, place_batch
from heinsen.quantities import count
from heinsen.training.checkpoint import Checkpoints, checkpoint_steps
from heinsen.training.config import TrainConfig, check_mesh
from heinsen.training.data import RunData, make_microbatches
from heinsen.training.devices import check_memory, explain_device_errors
from heinsen.training.folder import CONFIG_FILE, RunError, claim_folder, write_config
from heinsen.training.log import LossMean, Reporter
from heinsen.training.optimizer import make_optimizer
from heinsen.training.stages import Stage, stages_of
from heinsen.training.step import Metrics, TrainState, abstract_train_state, init_train_state, make_train_step
from heinsen.training.validation import Validator
from heinsen.weights import load_initial_params

# Steps in a row with a loss or gradient that is not finite, which are skipped, until a run stops.
STOP_AFTER_SKIPPED = 10


class NonFiniteLossError(HeinsenError, RuntimeError):
    """The loss, the gradient or the parameters are no longer finite."""


class RunInterruption(Interruption):
    """A signal of `StopSignals` or a preemption notice arrived; the run's state is saved."""


@explain_device_errors()
def train(config: TrainConfig, workdir: Path) -> Evaluation:
    """Train the run in `workdir`, resuming it if it has begun; return the last validation.

    Raises:
      DatasetError, MeshError, RunError, CheckpointError: before anything is overwritten.
      NonFiniteLossError, RunInterruption, DeviceError, RunError and CheckpointError (the folder can no longer be
        written), DatasetError (the data can no longer be read): later, with whole checkpoints to resume from.
    """
    keep_host_memory()
    mesh, is_main = make_mesh(config.mesh), jax.process_index() == 0
    check_mesh(config, mesh)
    if config.conversion.share is not None and config.init_from is None:
        raise RunError("init_from = None: a conversion starts from a trained model; set --config.init_from=DIR")
    stages = stages_of(config)
    optimizer = make_optimizer(stages[0].optimizer, stages[0].n_steps)
    abstract = abstract_train_state(config.model, optimizer, mesh)  # the same in all stages
    check_memory(config, mesh, abstract)
    data = RunData.open(config, mesh)
    validator = Validator(config, mesh, data)
    source, has_begun = None, bool(checkpoint_steps(workdir))
    if has_begun and not (workdir / CONFIG_FILE).exists():  # what it has read is not known
        raise RunError(f"{workdir} has checkpoints but no {CONFIG_FILE}: restore it, or give another --workdir")
    if config.init_from is not None and not has_begun:  # a run that has begun has its own parameters
        source = load_initial_params(config, mesh, data.tokenizer)
    with contextlib.ExitStack() as stack:
        changes = stack.enter_context(claim_folder(config, workdir, data.tokenizer, data.digest))
        checkpoints = stack.enter_context(Checkpoints(workdir, config.keep_checkpoints, config.keep_every))
        signals = stack.enter_context(StopSignals())
        if (restored := checkpoints.restore_newest(abstract, *config.fingerprints)) is not None:
            start_step, state, progress = restored
            origin, losses = f"resuming after step {start_step}", LossMean(progress.pop("losses"))
            data.batches.set_state(progress)
        else:
            start_step, losses, origin = 0, LossMean(), f"run folder {workdir}"
            state = init_train_state(config.model, optimizer, config.seed, mesh, source and source.params)
            if source is not None:
                origin += f", starting from the parameters of {config.init_from} after step {source.step}"
        stack.enter_context(_explain_full_disk(workdir, checkpoints))
        if is_main:
            write_config(config, workdir, data.tokenizer, data.digest)
            write_tokenizer_file(read_tokenizer_file(data.tokenizer, data.tokenizer_folder), workdir)
        n_params = count_params(state.params)
        reporter = Reporter(config, workdir, start_step, n_params, data.bytes_per_token, losses, is_main)
        stack.enter_context(reporter)
        reporter.message(
            f"{n_params:,} parameters on {jax.device_count()} x {jax.devices()[0].device_kind}; "
            f"{count(config.total_steps, 'step')} of {config.batch_size} x {config.sequence_length} tokens; {origin}"
        )
        for change in changes:
            reporter.message(f"{change}: continuing with the command's")
        loop = _Loop(config, mesh, data, validator, checkpoints, signals, reporter)
        return loop.run(stages, state, start_step)


@contextlib.contextmanager
def _explain_full_disk(workdir: Path, checkpoints: Checkpoints) -> Iterator[None]:
    """Raise RunError with a remedy where the block cannot write to the run folder."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{workdir} cannot be written: {describe(error)}. Free some space, then rerun the same command to "
            f"resume from {_newest(checkpoints)}"
        ) from error


def _newest(checkpoints: Checkpoints) -> str:
    newest = checkpoints.latest
    return "the beginning, as there is no checkpoint yet" if newest is None else str(checkpoints.path(newest))


@dataclasses.dataclass(frozen=True)
class _Loop:
    """The steps of a run.

    A step's metrics are fetched while the next step runs, and the batch after that is made meanwhile: the device does
    not wait for Python. The loop waits for a step itself only to save, to validate, to end a trace, and on CPUs that
    several devices share.
    """

    config: TrainConfig
    mesh: Mesh
    data: RunData
    validator: Validator
    checkpoints: Checkpoints
    signals: "StopSignals"
    reporter: Reporter

    def run(self, stages: Sequence[Stage], state: TrainState, start_step: int) -> Evaluation:
        c, result = self.config, None
        if c.conversion.share is not None and start_step == 0:
            with self.reporter.pause():
                teacher = self.validator.measure_teacher(state.params)
            swapped, _ = self.validate(0, state.params)
            self.reporter.message(
                f"validation loss {teacher.loss:.4f} of the teacher, {swapped.loss:.4f} with its attention only swapped"
            )
        for stage in stages:
            if start_step < stage.last_step:
                state, result = self.run_stage(stage, state, start_step)
                start_step = stage.last_step
        self.checkpoints.wait()
        return result or self.validate(c.total_steps, state.params)[0]

    def run_stage(self, stage: Stage, state: TrainState, start_step: int) -> tuple[TrainState, Evaluation]:
        """Run the steps of a stage after `start_step`. It ends with a validation and a checkpoint."""
        c, result, pending = self.config, None, None
        self.reporter.start_stage(stage)
        optimizer = make_optimizer(stage.optimizer, stage.n_steps)
        if start_step + 1 == stage.first_step > 1:
            state = init_train_state(c.model, optimizer, c.seed, self.mesh, state.params)
        train_step = make_train_step(c.model, optimizer, self.mesh, stage.loss, stage.trained)
        # Simulated devices that share a few cores deadlock in collectives when steps queue up.
        always_waits = jax.default_backend() == "cpu" and jax.device_count() > 1
        for step in range(start_step + 1, stage.last_step + 1):
            self.reporter.start_step(step)
            batches = self.next_batches(step)
            with self.reporter.compiling("training step") if step == start_step + 1 else contextlib.nullcontext():
                state, metrics = train_step(state, batches)
            if pending is not None:
                self.check_and_report(*pending)
            is_last, stopping = step == stage.last_step, self.signals.stop_after(step)
            saves = step % c.checkpoint_every == 0 or is_last or stopping is not None
            validates = step % c.validate_every == 0 or is_last
            pending, result = (step, metrics), None
            if saves or validates or always_waits or self.reporter.ends_trace(step):
                self.check_and_report(*pending)
                pending = None
            if validates:
                result, validation_metrics = self.validate(step, state.params)
                self.reporter.write(step, validation_metrics)
            if saves:
                with self.reporter.pause():
                    progress = {**self.data.batches.get_state(), "losses": self.reporter.losses.state}
                    self.checkpoints.save(step, state, progress, c.fingerprint)
            if stopping is not None and step < c.total_steps:
                self.checkpoints.wait()
                saved = self.checkpoints.path(step)
                raise RunInterruption(f"{stopping} at step {step}: saved {saved}; rerun the same command to resume")
        assert result is not None
        return state, result

    def next_batches(self, step: int) -> Any:
        """Return the batches [A, R, ...] of a step, placed on the mesh."""
        with self.reporter.waiting_for_data():
            windows = next(self.data.batches)["tokens"]
            return place_batch(self.mesh, make_microbatches(self.config, windows, step, self.data.rows), axis=1)

    def check_and_report(self, step: int, arrays: Metrics) -> None:
        """Report a step. Raises NonFiniteLossError: too many steps skipped in a row, or parameters not finite."""
        metrics = {name: x.item() for name, x in jax.device_get(arrays).items()}
        in_a_row = metrics.pop("skipped_in_a_row")
        if not math.isfinite(metrics["param_norm"]):
            raise NonFiniteLossError(
                f"parameters are no longer finite at step {step}: loss {metrics['loss']}, gradient norm "
                f"{metrics['grad_norm']}. Stopped without saving them. {self.advice()}"
            )
        if in_a_row:
            what = f"loss {metrics['loss']} and gradient norm {metrics['grad_norm']} at step {step}"
            if in_a_row >= STOP_AFTER_SKIPPED:
                raise NonFiniteLossError(
                    f"{what}: stopped after {in_a_row} such steps in a row, which changed no parameter. {self.advice()}"
                )
            self.reporter.message(f"{what}: skipped, {in_a_row} in a row, {metrics['skipped']} in all")
        self.reporter.report_step(step, metrics | {"skips": in_a_row > 0})

    def validate(self, step: int, params: Params) -> tuple[Evaluation, dict[str, float | str]]:
        """Return the result of `Validator`. Raises NonFiniteLossError."""
        with self.reporter.pause():
            result, metrics = self.validator(params)
        if not math.isfinite(result.loss):
            raise NonFiniteLossError(
                f"validation loss {result.loss} at step {step}. Stopped without saving the parameters. {self.advice()}"
            )
        return result, metrics

    def advice(self) -> str:
        return (
            f"Go back to {_newest(self.checkpoints)} with a lower --config.optimizer.learning_rate, or look at the "
            "data of these steps."
        )


# ---- requests to stop ------------------------------------------------------------------------

# SIGUSR1 is what SLURM's --signal is often set to; SIGHUP tells that the terminal has been closed.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class StopSignals:
    """Turns signals and a cluster's preemption notice into requests to stop after a step, the same in every process.

    Use as a context manager. A second SIGINT takes effect at once. A second one of the others does nothing: SLURM may
    send a job more than one. A signal that was ignored stays so: nohup ignores SIGHUP. A message says at once that the
    signal has arrived, also while Python waits for the device.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._previous: dict[int, Any] = {}
        self._alone = jax.process_count() == 1

    def __enter__(self) -> "StopSignals":
        self._terminals = [number for number in (1, 2) if os.isatty(number)]
        # With several processes JAX's preemption service receives SIGTERM and informs all of them.
        for number in _SIGNALS if self._alone else _SIGNALS[1:]:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)
        # Python runs handlers between two of its instructions, which may be minutes apart; it writes a signal's number
        # to this pipe at once.
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._previous_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._tell_signals, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._previous_wakeup)
        os.close(self._write)
        self._thread.join()
        os.close(self._read)
        for number, handler in list(self._previous.items()):
            signal.signal(number, handler)

    def stop_after(self, step: int) -> str | None:
        """Return what asks to stop after this step, or None. Call once per step, in every process."""
        if self._alone:
            return self.received
        return "a request to stop" if multihost_utils.reached_preemption_sync_point(step) else None

    def _tell_signals(self) -> None:
        while number := os.read(self._read, 1):
            if number[0] in _SIGNALS:
                self._leave_closed_terminals()
                again = "; again to stop at once, without saving" if number[0] == signal.SIGINT else ""
                tqdm.write(f"{signal.Signals(number[0]).name}: stopping after this step{again}", file=sys.stderr)

    def _leave_closed_terminals(self) -> None:
        """Write to nowhere instead: writing to a terminal that is closed is an error, which would end the run."""
        for number in self._terminals:
            if not os.isatty(number):
                with open(os.devnull, "w") as nowhere:
                    os.dup2(nowhere.fileno(), number)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        """Record the request. An exception could be lost here: where the garbage collector runs, Python ignores it."""
        self._leave_closed_terminals()
        self.received = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(number, self._previous.pop(number))
        if not self._alone:
            os.kill(os.getpid(), signal.SIGTERM)
