"""Evaluate a run's newest checkpoint on a whole split, every token predicted once: the loss and its uncertainty.

    python eval.py --workdir=RUN [--split=validation] [--config.any.field=value ...]
    python eval.py --workdir=RUN --streaming
    python eval.py --workdir=RUN --by_position=FILE.png
    python eval.py --workdir=RUN --tasks=lambada_openai,hellaswag [--num_fewshot=0 --limit=100]

By default eval.py reads windows of the training length. With --streaming it reads each document from its start and
carries the model's state on, so the context is unlimited. --by_position does both and compares them by the position in
the document: does a context beyond the training length help or hurt?

For a masked model (model.objective) it computes the pseudo-perplexity: it masks a seventh of a window's tokens at a
time, each token once, always the same ones together (heinsen/models/masking.py: window_losses).

--tasks runs tasks of the lm-evaluation-harness (pip install lm-eval): its own, or those of YAML files in --task_folder.

eval.py prints a table, and one JSON object on the last line of stdout. Intervals are 95% intervals of a bootstrap over
documents. If documents name their sources (The Pile: meta.pile_set_name), it lists each source. --config fields
override those of the run, for example --config.data.path=... for other data.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from absl import app, flags, logging

from configs import default
from scripts.cli import given_fields, parse_flags, refuse
from scripts.config_files import override

if TYPE_CHECKING:
    from heinsen.training.config import TrainConfig

WORKDIR = flags.DEFINE_string("workdir", None, "Run folder of train.py, or of scripts/export.py.", required=True)
CONFIG = flags.DEFINE_string("config", None, "--config.a.b=value overrides a field of the run's config.")
SPLIT = flags.DEFINE_string("split", None, "Split of the run's data; none: the run's validation split.")
STREAMING = flags.DEFINE_bool("streaming", False, "Read each document from its start and carry the state on.")
BY_POSITION = flags.DEFINE_string("by_position", None, "Plot file: loss by position, in windows and streaming.")
TASKS = flags.DEFINE_list("tasks", [], "Tasks of the lm-evaluation-harness, instead of a split.")
TASK_FOLDER = flags.DEFINE_string("task_folder", None, "Folder of the tasks' YAML files; none: the harness's own.")
NUM_FEWSHOT = flags.DEFINE_integer(
    "num_fewshot", None, "Examples before each question; none: the task's own number.", lower_bound=0
)
LIMIT = flags.DEFINE_integer("limit", None, "Maximum questions per task; none: all.", lower_bound=1)
ADD_BOS_TOKEN = flags.DEFINE_bool("add_bos_token", True, "Put the end-of-text token before every text of a task.")
TASK_BATCH = flags.DEFINE_integer("task_batch", 16, "Texts of tasks that the model reads at a time.", lower_bound=1)


def main(argv: list[str]) -> None:
    if CONFIG.value is not None:
        refuse(f"--config={CONFIG.value}: a run has its own; override fields, --config.a.b=value")
    logging.set_verbosity(logging.WARNING)
    from heinsen.errors import exit_on_error
    from heinsen.host import keep_compilations

    keep_compilations()
    with exit_on_error(on_interrupt="interrupted; nothing was written"):
        if TASKS.value:
            print_tasks()
        else:
            print_split()


def print_split() -> None:
    """Evaluate a split, and print the tables and the JSON line."""
    from heinsen.evaluation.positions import plot_positions
    from heinsen.evaluation.split import evaluate_split
    from heinsen.evaluation.tables import format_split, summarize_split

    plot = None if BY_POSITION.value is None else Path(BY_POSITION.value)
    if plot is not None:
        check_plot_path(plot)
    config = read_run_config()
    split = SPLIT.value or config.data.validation_split
    result = evaluate_split(config, WORKDIR.value, split, STREAMING.value, with_positions=plot is not None)
    print(f"{format_split(result)}\n{json.dumps(summarize_split(result))}", flush=True)
    if plot is not None and result.positions is not None:
        plot_positions(result.positions, f"{Path(WORKDIR.value).name}, step {result.step}: {split}", plot)


def check_plot_path(path: Path) -> None:
    """Raise InputError or OSError where a plot could not be written, before hours are spent on it."""
    from heinsen.errors import InputError
    from heinsen.files import make_folder

    if path.suffix != ".png":
        raise InputError(f"--by_position={path}: expected the name of a file that ends in .png")
    make_folder(path.parent)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError(f"--by_position={path} cannot be written; give another file")


def print_tasks() -> None:
    """Run --tasks, and print their metrics and the JSON line."""
    from heinsen.evaluation.tables import format_tasks, summarize_tasks
    from heinsen.evaluation.tasks import run_tasks

    result = run_tasks(
        read_run_config(),
        WORKDIR.value,
        TASKS.value,
        folder=TASK_FOLDER.value,
        num_fewshot=NUM_FEWSHOT.value,
        limit=LIMIT.value,
        batch_size=TASK_BATCH.value,
        add_bos_token=ADD_BOS_TOKEN.value,
    )
    print("\n".join([*format_tasks(result), json.dumps(summarize_tasks(result))]))


def read_run_config() -> "TrainConfig":
    """Return the run's own config with the fields of the flags. Raises HeinsenError."""
    from heinsen.config import from_mapping
    from heinsen.training.config import TrainConfig
    from heinsen.training.folder import load_run

    values = default.get_config()
    values.update(dataclasses.asdict(load_run(Path(WORKDIR.value))))
    return from_mapping(TrainConfig, override(values, given_fields()).to_dict())


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
