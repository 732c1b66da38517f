"""Evaluate a run's newest checkpoint on a whole split: every token predicted once, in windows of the training length.

    python eval.py --workdir=RUN [--split=validation] [--config.any.field=value ...]

Prints a table, and one JSON object on the last line of stdout. --config fields override those of the run, for example
--config.data.path=... for other data.
"""

import dataclasses
import json
import sys
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags

from configs import parse_flags

WORKDIR = flags.DEFINE_string("workdir", None, "Run folder of train.py.", required=True)
SPLIT = flags.DEFINE_string("split", None, "Split of the run's data; none: the run's validation split.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    logging.set_verbosity(logging.WARNING)
    import jax
    from tqdm import tqdm

    from heinsen.config import ConfigError, from_mapping
    from heinsen.data.dataset import DatasetError
    from heinsen.data.loader import evaluation_batches
    from heinsen.evaluation import evaluate, make_eval_step
    from heinsen.parallel import make_mesh
    from heinsen.training.checkpoint import CheckpointError
    from heinsen.training.loop import RunError, TrainConfig, load_params, open_split

    try:
        config = from_mapping(TrainConfig, flags.FLAGS.config.to_dict())
        split = SPLIT.value or config.data.validation_split
        dataset = open_split(config, split)
        mesh = make_mesh()
        step, params = load_params(Path(WORKDIR.value), config.model, mesh)
    except (ConfigError, DatasetError, RunError, CheckpointError) as error:
        sys.exit(f"error: {error}")
    # As many sequences at a time as training held, rounded up to a multiple of the devices.
    per_pass = config.batch_size // config.accumulation_steps
    batch_size = -(-per_pass // jax.device_count()) * jax.device_count()
    batches = evaluation_batches(dataset, config.sequence_length, batch_size)
    shown = tqdm(batches, desc=f"evaluating {split}", unit="batch", disable=not sys.stderr.isatty())
    result = evaluate(make_eval_step(config.model, mesh), params, shown, mesh, dataset.num_bytes / dataset.num_tokens)
    rows = [
        ("run", f"{WORKDIR.value}, step {step}"),
        ("split", f"{split}: {result.tokens:,} tokens, {dataset.num_bytes:,} bytes"),
        ("loss", f"{result.loss:.4f} nats a token"),
        ("perplexity", f"{result.perplexity:.3f}"),
        ("bits per byte", f"{result.bits_per_byte:.4f}"),
    ]
    print("\n".join(f"{name:<14} {value}" for name, value in rows))
    print(json.dumps({"workdir": WORKDIR.value, "step": step, "split": split, **dataclasses.asdict(result)}))


def define_config_flag(arguments: list[str]) -> None:
    """Define --config with the run's own config as its default, so that overrides of its fields are checked."""
    from configs import default
    from heinsen.training.loop import RunError, load_run

    workdir = flags.FlagValues()
    flags.DEFINE_string("workdir", None, "", flag_values=workdir)
    workdir([argument for argument in arguments if not argument.startswith("--config")], known_only=True)
    config = default.get_config()
    if workdir.workdir is not None:
        try:
            config.update(dataclasses.asdict(load_run(Path(workdir.workdir))))
        except (RunError, ValueError) as error:
            sys.exit(f"error: {error}")
    config_flags.DEFINE_config_dict("config", config, "Overrides of the run's config.")


if __name__ == "__main__":
    try:
        define_config_flag(sys.argv)
    except (AttributeError, KeyError) as error:  # a field that the config does not have
        sys.exit(f"FATAL Flags parsing error: --config has no such field: {error}")
    app.run(main, flags_parser=parse_flags)
