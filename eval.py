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

WORKDIR = flags.DEFINE_string("workdir", None, "Run folder of train.py, or of scripts/export.py.", required=True)
SPLIT = flags.DEFINE_string("split", None, "Split of the run's data; none: the run's validation split.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    logging.set_verbosity(logging.WARNING)
    from tqdm import tqdm

    from heinsen.config import ConfigError, from_mapping
    from heinsen.data.dataset import DatasetError
    from heinsen.data.loader import evaluation_batches
    from heinsen.evaluation import evaluate, make_eval_step, mean_of_mixture
    from heinsen.parallel import MeshError, n_batch_parts
    from heinsen.training.checkpoint import CheckpointError
    from heinsen.training.loop import load_params, mesh_for_reading
    from heinsen.training.run import RunError, TrainConfig, open_split

    try:
        config = from_mapping(TrainConfig, flags.FLAGS.config.to_dict())
        split = SPLIT.value or config.data.validation_split
        datasets = open_split(config, split)
        mesh = mesh_for_reading(config)
        step, params = load_params(Path(WORKDIR.value), config.model, mesh)
    except (ConfigError, DatasetError, MeshError, RunError, CheckpointError) as error:
        sys.exit(f"error: {error}")
    # As many sequences at a time as training held, rounded up to a multiple of the devices.
    batch_size = -(-config.sequences_per_pass // n_batch_parts(mesh)) * n_batch_parts(mesh)
    eval_step, parts = make_eval_step(config.model, mesh), []
    for dataset, share in datasets:
        batches = evaluation_batches(dataset, config.sequence_length, batch_size)
        shown = tqdm(batches, desc=f"evaluating {dataset.path}", unit="batch", disable=not sys.stderr.isatty())
        parts.append((share, evaluate(eval_step, params, shown, mesh, dataset.bytes_per_token)))
    result = mean_of_mixture(parts)
    n_bytes = sum(dataset.num_bytes for dataset, _ in datasets)
    rows = [
        ("run", f"{WORKDIR.value}, step {step}"),
        ("split", f"{split}: {result.tokens:,} tokens, {n_bytes:,} bytes"),
    ]
    if len(parts) > 1:
        for (dataset, share), (_, part) in zip(datasets, parts, strict=True):
            rows.append((dataset.path.parent.name, f"{part.loss:.4f} nats a token, share {share:.3g}"))
    rows += [
        ("loss", f"{result.loss:.4f} nats a token"),
        ("perplexity", f"{result.perplexity:.3f}"),
        ("bits per byte", f"{result.bits_per_byte:.4f}"),
    ]
    print("\n".join(f"{name:<14} {value}" for name, value in rows))
    print(json.dumps({"workdir": WORKDIR.value, "step": step, "split": split, **dataclasses.asdict(result)}))


def define_config_flag(arguments: list[str]) -> None:
    """Define --config with the run's own config as its default, so that overrides of its fields are checked."""
    from configs import default
    from heinsen.training.run import RunError, load_run

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
    except flags.Error as error:
        sys.exit(f"FATAL Flags parsing error: {error}")
    app.run(main, flags_parser=parse_flags)
