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
import sys
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags

from configs import default, parse_flags, refuse, refuse_missing_fields

WORKDIR = flags.DEFINE_string("workdir", None, "Run folder of train.py, or of scripts/export.py.", required=True)
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
    logging.set_verbosity(logging.WARNING)
    from heinsen.errors import exit_on_error
    from heinsen.platform import keep_compilations

    keep_compilations()
    with exit_on_error(on_interrupt="interrupted; nothing was written"):
        if TASKS.value:
            run_tasks()
        else:
            evaluate_split()


def evaluate_split() -> None:
    """Evaluate a split, and print the tables and the JSON line."""
    from heinsen.config import from_mapping
    from heinsen.evaluation import report, run
    from heinsen.training.config import TrainConfig

    plot = None if BY_POSITION.value is None else Path(BY_POSITION.value)
    if plot is not None:
        report.check_plot_path(plot)
    config = from_mapping(TrainConfig, flags.FLAGS.config.to_dict())
    split = SPLIT.value or config.data.validation_split
    mode = run.STREAMING if STREAMING.value else run.WINDOWS
    result = run.evaluate_split(config, WORKDIR.value, split, mode, with_positions=plot is not None)
    print(f"{report.format_result(result)}\n{json.dumps(report.summarize_result(result))}", flush=True)
    if plot is not None:
        report.plot_positions(result, plot)


def run_tasks() -> None:
    """Run --tasks, and print their metrics and the JSON line."""
    from heinsen.config import from_mapping
    from heinsen.evaluation import report, tasks
    from heinsen.training.config import TrainConfig

    config = from_mapping(TrainConfig, flags.FLAGS.config.to_dict())
    options = tasks.TaskOptions(
        TASKS.value, TASK_FOLDER.value, NUM_FEWSHOT.value, LIMIT.value, TASK_BATCH.value, ADD_BOS_TOKEN.value
    )
    result = tasks.run_tasks(config, WORKDIR.value, options)
    print("\n".join([*report.format_tasks(result), json.dumps(report.summarize_tasks(result))]))


def define_config_flag(arguments: list[str]) -> None:
    """Define --config with the run's own config as its default, so that overrides of its fields are checked."""
    workdir = flags.FlagValues()
    flags.DEFINE_string("workdir", None, "", flag_values=workdir)
    workdir([argument for argument in arguments if not argument.startswith("--config")], known_only=True)
    config = default.get_config()
    if workdir.workdir:
        from heinsen.errors import exit_on_error
        from heinsen.training.folder import load_run
        from heinsen.training.mirror import local_run

        with exit_on_error():
            config.update(dataclasses.asdict(load_run(local_run(workdir.workdir))))
    refuse_missing_fields(arguments, config)
    config_flags.DEFINE_config_dict("config", config, "--config.a.b=value overrides a field of the run's config.")
    flags.FLAGS["config"].default_as_str = "the run's own"  # for --help, instead of all fields


if __name__ == "__main__":
    try:
        define_config_flag(sys.argv)
    except flags.Error as error:
        refuse(str(error))
    app.run(main, flags_parser=parse_flags)
