"""Train a language model.

    python train.py --config=configs/NAME.py --workdir=DIR [--config.any.field=value ...]
    python train.py --config=configs/NAME.py --plan [--config.any.field=value ...]

A --workdir that holds a run resumes it. Ctrl-C, SIGTERM or a cluster's preemption notice saves a checkpoint and leaves
with status 75: the same command goes on. --plan compiles the step, times it and tells what the whole run would cost.

On several hosts one process a host, with the same command: started by srun or mpirun they find each other; on a TPU pod
pass --distributed; else pass --coordinator=HOST:PORT --num_processes=N --process_id=I to each (docs/SCALING.md).
"""

import os
import sys
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags

from configs import parse_flags

CONFIG = config_flags.DEFINE_config_file("config", None, "Config file; --config.a.b=value overrides a field.")
WORKDIR = flags.DEFINE_string("workdir", None, "Run folder: config, metrics, checkpoints, plots.")
PLAN = flags.DEFINE_bool("plan", False, "Tell what the run would take, without starting it.")
PLAN_STEPS = flags.DEFINE_integer("plan_steps", 3, "--plan: steps to time; 0 compiles only.", lower_bound=0)
DISTRIBUTED = flags.DEFINE_bool("distributed", None, "Find the other processes by the cluster's environment.")
COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0, the same in every process.")
NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "How many processes there are.")
PROCESS_ID = flags.DEFINE_integer("process_id", None, "Which of them this is, from 0.")
flags.mark_flag_as_required("config")

EXIT_INTERRUPTED = 75  # EX_TEMPFAIL: run again


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    if WORKDIR.value is None and not PLAN.value:
        raise app.UsageError("--workdir=DIR is missing: the folder of the run")
    logging.set_verbosity(logging.WARNING)
    import jax

    from heinsen.config import ConfigError, from_mapping
    from heinsen.data.dataset import DatasetError
    from heinsen.parallel import MeshError, join_processes
    from heinsen.training.checkpoint import CheckpointError
    from heinsen.training.loop import NonFiniteLossError, RunInterrupted, train
    from heinsen.training.plan import plan
    from heinsen.training.run import RunError, TrainConfig

    try:
        mapping = CONFIG.value.to_dict()
    except OSError as error:
        sys.exit(f"error: --config cannot be loaded: {str(error).splitlines()[-1].strip()}")
    try:
        config = from_mapping(TrainConfig, mapping)
        join_processes(COORDINATOR.value, NUM_PROCESSES.value, PROCESS_ID.value, DISTRIBUTED.value)
        if PLAN.value:
            planned = plan(config, PLAN_STEPS.value)
            if jax.process_index() == 0:
                print(planned)
            return
        result = train(config, Path(WORKDIR.value))
    except RunInterrupted as interruption:
        print(interruption, file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except (ConfigError, DatasetError, MeshError, RunError, CheckpointError, NonFiniteLossError) as error:
        leave(f"error: {error}")
    except jax.errors.JaxRuntimeError as error:
        leave(f"error: {explain(error)}")
    if jax.process_index() == 0:
        print(
            f"{WORKDIR.value}: validation loss {result.loss:.4f} nats a token, {result.bits_per_byte:.4f} bits a byte "
            f"over {result.tokens:,} tokens"
        )


def explain(error: Exception) -> str:
    """What to do about an error of a device or of another process."""
    import jax

    text = str(error).splitlines()[0]
    if "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        return (
            f"out of device memory: {text}. Raise --config.accumulation_steps, set --config.model.remat=full, or split "
            "the model with --config.mesh.fsdp; --plan tells what a step needs"
        )
    if jax.process_count() > 1:
        return f"another process of the run failed or was lost: {text}. Start all of them again: the run goes on"
    return text


def leave(message: str) -> None:
    """End with an error. Of several processes none waits for the others: they may be lost, or wait for this one."""
    import jax

    if not jax.distributed.is_initialized():
        sys.exit(message)
    print(message, file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
