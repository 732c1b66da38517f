"""Train a language model.

    python train.py --config=configs/NAME.py --workdir=DIR [--config.any.field=value ...]

A --workdir that holds a run resumes it. Ctrl-C or SIGTERM saves a checkpoint and leaves with status 75: the same
command goes on.
"""

import sys
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags

from configs import parse_flags

CONFIG = config_flags.DEFINE_config_file("config", None, "Config file; --config.a.b=value overrides a field.")
WORKDIR = flags.DEFINE_string("workdir", None, "Run folder: config, metrics, checkpoints, plots.")
flags.mark_flags_as_required(["config", "workdir"])

EXIT_INTERRUPTED = 75  # EX_TEMPFAIL: run again


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    logging.set_verbosity(logging.WARNING)
    from heinsen.config import ConfigError, from_mapping
    from heinsen.data.dataset import DatasetError
    from heinsen.training.checkpoint import CheckpointError
    from heinsen.training.loop import NonFiniteLossError, RunError, RunInterrupted, TrainConfig, train

    try:
        mapping = CONFIG.value.to_dict()
    except OSError as error:
        sys.exit(f"error: --config cannot be loaded: {str(error).splitlines()[-1].strip()}")
    try:
        config = from_mapping(TrainConfig, mapping)
        result = train(config, Path(WORKDIR.value))
    except RunInterrupted as interruption:
        print(interruption, file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except (ConfigError, DatasetError, RunError, CheckpointError, NonFiniteLossError) as error:
        sys.exit(f"error: {error}")
    print(
        f"{WORKDIR.value}: validation loss {result.loss:.4f} nats a token, {result.bits_per_byte:.4f} bits a byte "
        f"over {result.tokens:,} tokens"
    )


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
