"""Train a language model.

    python train.py --config=configs/NAME.py --workdir=DIR [--config.any.field=value ...]
    python train.py --config=configs/NAME.py --plan [--target=MACHINE] [--config.any.field=value ...]

If --workdir holds a run, train.py resumes it. On Ctrl-C, SIGTERM, SIGUSR1, SIGHUP or a cluster's preemption notice it
saves a checkpoint and exits with status 75: rerun the same command to resume. --plan compiles the step, times it and
prints what the whole run would cost; with --target=h200-8, v5p-8, ... for another machine, by its compiler
and without timing (docs/planning.md).

On several hosts start one process per host with the same command. Started by srun or mpirun they find each other; on a
TPU pod pass --distributed; otherwise pass --coordinator=HOST:PORT --num_processes=N --process_id=I to each
(docs/scaling.md).
"""

from pathlib import Path

from absl import app, flags, logging

from scripts.cli import parse_flags, read_config, refuse, refuse_address

CONFIG = flags.DEFINE_string("config", None, "Config file; --config.a.b=value overrides a field.", required=True)
WORKDIR = flags.DEFINE_string("workdir", None, "Run folder: metrics, checkpoints, plots. Required without --plan.")
PLAN = flags.DEFINE_bool("plan", False, "Print what the run would take, without starting it.")
PLAN_STEPS = flags.DEFINE_integer("plan_steps", 3, "--plan: steps to time; 0: only compile.", lower_bound=0)
TARGET = flags.DEFINE_string("target", None, "--plan: the machine to plan for, such as h100, h200-8, v5e-4, v5p-8.")
PEAK_FLOPS = flags.DEFINE_float("peak_flops", None, "--plan: peak rate of a device, default: as known or measured.")
DISTRIBUTED = flags.DEFINE_bool("distributed", None, "Find the other processes through the cluster's environment.")
COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0, the same in every process.")
NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "Number of processes.")
PROCESS_ID = flags.DEFINE_integer("process_id", None, "Index of this process, from 0.")
PEER_TIMEOUT = flags.DEFINE_integer("peer_timeout", 100, "Seconds of silence after which another process is lost.")


def main(argv: list[str]) -> None:
    if TARGET.value is not None and not PLAN.value:
        refuse("--target is the machine to plan for: it goes with --plan")
    if WORKDIR.value is None and not PLAN.value:
        refuse("--workdir=DIR is missing: the folder of the run")
    refuse_address("workdir")
    logging.set_verbosity(logging.WARNING)
    from heinsen.errors import exit_on_error

    with exit_on_error():
        report = run()
    if report is not None:
        print(report)


def run() -> str | None:
    """Train or plan the run; return what to print, None in all processes but the first."""
    values = read_config(CONFIG)
    import jax

    from heinsen.distributed import join_processes
    from heinsen.host import keep_compilations
    from heinsen.plan.plan import plan_stages
    from heinsen.training.data import train_config
    from heinsen.training.loop import train

    config = train_config(values)
    if TARGET.value is not None:
        return "\n\n".join(map(str, plan_stages(config, 0, TARGET.value, PEAK_FLOPS.value)))
    join_processes(COORDINATOR.value, NUM_PROCESSES.value, PROCESS_ID.value, DISTRIBUTED.value, PEER_TIMEOUT.value)
    if PLAN.value:
        plans = plan_stages(config, PLAN_STEPS.value, peak_flops=PEAK_FLOPS.value)
        report = "\n\n".join(map(str, plans))
    else:
        keep_compilations()
        result = train(config, Path(WORKDIR.value))
        report = (
            f"{WORKDIR.value}: validation loss {result.loss:.4f} nats per token, {result.bits_per_byte:.4f} bits per "
            f"byte over {result.extent} of the split {config.data.validation_split}"
        )
    return report if jax.process_index() == 0 else None


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
