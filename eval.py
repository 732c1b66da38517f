"""Evaluate a run's newest checkpoint on a whole split, every token predicted once: the loss, and how sure it is.

    python eval.py --workdir=RUN [--split=validation] [--config.any.field=value ...]
    python eval.py --workdir=RUN --streaming
    python eval.py --workdir=RUN --by_position=FILE.png
    python eval.py --workdir=RUN --tasks=lambada_openai,hellaswag [--num_fewshot=0 --limit=100]

In windows of the training length, or with --streaming each document from its start with the model's state carried on,
without a limit to the context. --by_position does both and compares them by the position in the document: does a
context beyond the training length help or hurt?

Of a masked model (model.objective) the pseudo-perplexity: a seventh of a window's tokens is hidden at a time, each
token once, always the same ones together (heinsen/masking.py: window_losses).

--tasks asks the lm-evaluation-harness (pip install lm-eval): its own tasks, or those of YAML files in --task_folder.

Prints a table, and one JSON object on the last line of stdout; intervals are 95% of a bootstrap over documents. Sources
that the documents name (The Pile: meta.pile_set_name) are listed one by one. --config fields override those of the run,
for example --config.data.path=... for other data.
"""

import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from absl import app, flags, logging
from ml_collections import config_flags

from configs import parse_flags

WORKDIR = flags.DEFINE_string("workdir", None, "Run folder of train.py, or of scripts/export.py.", required=True)
SPLIT = flags.DEFINE_string("split", None, "Split of the run's data; none: the run's validation split.")
STREAMING = flags.DEFINE_bool("streaming", False, "Each document from its start, with the state carried on.")
BY_POSITION = flags.DEFINE_string("by_position", None, "Loss by position, in windows and streaming: the plot's file.")
TASKS = flags.DEFINE_list("tasks", [], "Tasks of the lm-evaluation-harness, instead of a split.")
TASK_FOLDER = flags.DEFINE_string("task_folder", None, "Folder of the tasks' YAML files; none: the harness's own.")
NUM_FEWSHOT = flags.DEFINE_integer(
    "num_fewshot", None, "Examples before each question; none: the task's.", lower_bound=0
)
LIMIT = flags.DEFINE_integer("limit", None, "Questions of each task at most; none: all.", lower_bound=1)
TASK_BATCH = flags.DEFINE_integer("task_batch", 16, "Texts that tasks have read at a time.", lower_bound=1)

LOG_SECONDS = 10  # between lines of progress where stderr is no terminal


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    logging.set_verbosity(logging.WARNING)
    from heinsen.config import ConfigError, from_mapping
    from heinsen.data.dataset import DatasetError
    from heinsen.data.documents import find_documents
    from heinsen.data.tokenizer import get_tokenizer
    from heinsen.evaluation.by_document import by_position, estimate, estimate_sources, plot_by_position
    from heinsen.parallel import MeshError
    from heinsen.training.checkpoint import CheckpointError
    from heinsen.training.run import RunError, TrainConfig, open_split
    from heinsen.weights import load_params, mesh_for_reading

    if TASKS.value:
        return ask_tasks()
    plot = None if BY_POSITION.value is None else Path(BY_POSITION.value)
    try:
        if plot is not None:
            check_plot(plot)
        config = from_mapping(TrainConfig, flags.FLAGS.config.to_dict())
        split = SPLIT.value or config.data.validation_split
        datasets = open_split(config, split)
        if not config.model.causal and (plot is not None or STREAMING.value):
            raise ConfigError("a masked model reads whole windows: it has no state for --streaming or --by_position")
        mesh = mesh_for_reading(config)
        step, params = load_params(Path(WORKDIR.value), config.model, mesh)
        try:
            tokenizer = get_tokenizer(config.data.tokenizer)
        except RuntimeError as error:  # its files are missing, and only tell the bytes of each document
            tokenizer = None
            print(f"bytes of documents are taken in proportion to their tokens: {error}", file=sys.stderr)
        documents = [find_documents(dataset, tokenizer) for dataset, _ in datasets]
        modes = ["windows", "streaming"] if plot is not None else ["streaming" if STREAMING.value else "windows"]
        measured = {
            mode: [
                (share, measure(mode, config, params, mesh, own))
                for own, (_, share) in zip(documents, datasets, strict=True)
            ]
            for mode in modes
        }
    except (ConfigError, DatasetError, MeshError, RunError, CheckpointError, ValueError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; nothing was written")
    mode = "streaming" if STREAMING.value else "windows"
    parts = measured[mode]
    result, sources = estimate(parts), estimate_sources(parts)
    if not math.isfinite(result.loss):
        sys.exit(f"error: the loss is {result.loss}: the parameters of {WORKDIR.value}, step {step}, are of no use")
    n_bytes = sum(dataset.num_bytes for dataset, _ in datasets)
    how = f"windows of {config.sequence_length} tokens" if mode == "windows" else "streaming, documents whole"
    rows = [
        ("run", f"{WORKDIR.value}, step {step}"),
        ("split", f"{split}: {result.tokens:,} tokens, {n_bytes:,} bytes, {result.documents:,} documents; {how}"),
    ]
    if len(parts) > 1:
        for share, sums in parts:
            name = sums.documents.dataset.path.parent.name
            rows.append((name, f"{sums.loss:.4f} nats a token, share {share:.3g}"))
    perplexity = "perplexity" if config.model.causal else "pseudo-perplexity"
    perplexity_interval = result.loss_interval and tuple(map(math.exp, result.loss_interval))
    rows += [
        ("loss", f"{result.loss:.4f} nats a token{interval(result.loss_interval)}"),
        (perplexity, f"{result.perplexity:.3f}{interval(perplexity_interval, 3)}"),
    ]
    if result.bits_per_byte is not None:
        rows.append(("bits per byte", f"{result.bits_per_byte:.4f}{interval(result.bits_per_byte_interval)}"))
    width = max(14, len(perplexity))
    print("\n".join(f"{name:<{width}} {value}" for name, value in rows))
    summary = {"workdir": WORKDIR.value, "step": step, "split": split, "mode": mode, **dataclasses.asdict(result)}
    summary[perplexity.replace("-", "_")] = summary.pop("perplexity")
    if sources is not None:
        named = {name or "(none named)": source for name, source in sources.items()}
        print("\n" + source_table(named))
        summary["sources"] = {name: dataclasses.asdict(source) for name, source in named.items()}
    if plot is not None:
        positions = by_position(measured["windows"], measured["streaming"])
        print("\n" + position_table(positions))
        try:
            plot_by_position(positions, f"{Path(WORKDIR.value).name}, step {step}: {split}", plot)
        except OSError as error:
            print(f"the plot cannot be written: {error}", file=sys.stderr)
        summary["by_position"] = dataclasses.asdict(positions)
    print(json.dumps(summary))


def ask_tasks() -> None:
    """Prints the metrics of --tasks as the lm-evaluation-harness computes them."""
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError:
        sys.exit("error: --tasks needs the lm-evaluation-harness: pip install 'lm-eval>=0.4.9'")
    from heinsen.config import ConfigError, from_mapping
    from heinsen.data.tokenizer import get_tokenizer
    from heinsen.evaluation.harness import Answers, as_lm
    from heinsen.parallel import MeshError, make_mesh
    from heinsen.training.checkpoint import CheckpointError
    from heinsen.training.run import RunError, TrainConfig
    from heinsen.weights import load_params

    show = lambda batches, what: shown(batches, what, sum(map(len, batches)), len, "texts")
    try:
        config = from_mapping(TrainConfig, flags.FLAGS.config.to_dict())
        # Naming no folder of its own, the manager knows all tasks of the harness, which takes it many seconds.
        manager = TaskManager(include_path=TASK_FOLDER.value, include_defaults=TASK_FOLDER.value is None)
        if unknown := sorted(set(TASKS.value) - set(manager.match_tasks(TASKS.value))):
            where = TASK_FOLDER.value or "the installed harness"
            raise ValueError(f"--tasks={','.join(unknown)}: {where} has no such task")
        step, params = load_params(Path(WORKDIR.value), config.model, make_mesh())
        answers = Answers(config.model, params, get_tokenizer(config.data.tokenizer), TASK_BATCH.value, show)
        found = lm_eval.simple_evaluate(
            model=as_lm(answers), tasks=TASKS.value, task_manager=manager, num_fewshot=NUM_FEWSHOT.value,
            limit=LIMIT.value,
        )  # fmt: skip
    except (ConfigError, MeshError, RunError, CheckpointError, ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    results = {
        task: {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
        for task, metrics in found["results"].items()
    }
    for task, metrics in results.items():
        for name, value in metrics.items():
            if "," in name and "_stderr," not in name:  # metric,filter
                error = metrics.get(name.replace(",", "_stderr,", 1))
                print(f"{task:<24} {name:<24} {value:.4f}" + (f" +- {error:.4f}" if error is not None else ""))
    print(json.dumps({"workdir": WORKDIR.value, "step": step, "tasks": results}))


def measure(mode: str, config, params, mesh, documents):
    """The sums of losses over one dataset's documents, with progress on stderr."""
    from heinsen.data.documents import DocumentBatches
    from heinsen.data.loader import evaluation_batches
    from heinsen.evaluation import by_document
    from heinsen.models import check_room, init_model_state
    from heinsen.parallel import n_batch_parts

    up_to_devices = lambda n: -(-n // n_batch_parts(mesh)) * n_batch_parts(mesh)
    # As many sequences at a time as training held, rounded up to a multiple of the devices.
    batch_size, length = up_to_devices(config.sequences_per_pass), config.sequence_length
    sums = by_document.Sums(documents, length, config.model.document_token is not None)
    what = f"{documents.dataset.path}, {mode}"
    show = lambda batches: shown(batches, what, batches.num_tokens, lambda batch: int(batch["mask"].sum()), "tokens")
    if mode == "windows":
        batches = evaluation_batches(documents.dataset, length, batch_size)
        step = by_document.make_window_step(config.model, mesh)
        by_document.measure_windows(step, params, show(batches), mesh, sums)
    else:
        lanes = min(batch_size, up_to_devices(len(documents)))
        multiple = mesh.shape["sequence"] * mesh.shape["tensor"]
        batches = DocumentBatches(documents, length, lanes, multiple)
        step = by_document.make_stream_step(config.model, mesh)
        # A cache, where a kind of attention has one, holds the longest document.
        longest = int(documents.lengths.max())
        check_room(config.model, longest)
        begin = init_model_state(config.model, lanes, longest)
        by_document.measure_streaming(step, params, show(batches), mesh, sums, begin)
    return sums


def shown(items: Iterable, what: str, total: int, count: Callable[[Any], int], unit: str) -> Iterator:
    """The items; meanwhile number, rate and time left on stderr: a bar on a terminal, else a line now and then."""
    from tqdm import tqdm

    done = 0
    bar = tqdm(desc=what, total=total, unit=f" {unit}", unit_scale=True) if sys.stderr.isatty() else None
    start = last = time.monotonic()
    for item in items:
        yield item
        now = time.monotonic()
        done += count(item)
        if bar is not None:
            bar.update(count(item))
        elif now - last >= LOG_SECONDS or (done == total and last > start):
            last, rate = now, done / (now - start)
            left = tqdm.format_interval((total - done) / rate)
            line = f"{what}: {done:,} of {total:,} {unit}, {rate:,.0f} {unit}/s, ETA {left}"
            print(line, file=sys.stderr, flush=True)
    if bar is not None:
        bar.close()


def check_plot(path: Path) -> None:
    """Exits where a plot could not be written, before hours are spent on it."""
    if path.suffix != ".png":
        sys.exit(f"error: --by_position={path}: expected the name of a file that ends in .png")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise PermissionError(None, "permission denied")
    except OSError as error:
        sys.exit(f"error: --by_position={path} cannot be written: {error.strerror}; give another file")


def interval(bounds: tuple[float, float] | None, digits: int = 4) -> str:
    return "" if bounds is None else f" [{bounds[0]:.{digits}f}, {bounds[1]:.{digits}f}]"


def source_table(sources: dict) -> str:
    width = max(len("source"), *map(len, sources))
    lines = [f"{'source':<{width}} {'documents':>10} {'tokens':>12}  loss [95%]                bits per byte [95%]"]
    for name, source in sources.items():
        loss = f"{source.loss:.4f}{interval(source.loss_interval)}"
        bits = "" if source.bits_per_byte is None else f"{source.bits_per_byte:.4f}"
        lines.append(
            f"{name:<{width}} {source.documents:>10,} {source.tokens:>12,}  {loss:<25} "
            f"{bits}{interval(source.bits_per_byte_interval)}"
        )
    return "\n".join(line.rstrip() for line in lines)


def position_table(positions) -> str:
    """By ranges of positions the losses of the same tokens in windows and streaming, and what follows from them."""
    reach = lambda r: f"{r.first}+" if r.last is None else f"{r.first}-{r.last}" if r.last > r.first else f"{r.first}"
    seen = {context.first: f"{context.loss:.4f}" for context in positions.contexts}
    ranges = {r.first: r for r in positions.ranges}
    labels = {r.first: reach(r) for r in [*positions.ranges, *positions.contexts]}
    lines = [
        f"Loss by position in the document (tokens before it), in windows of {positions.window} and streaming; right:",
        "loss in windows by the tokens before it that the window shows.",
        f"{'position':>12} {'tokens':>12} {'windows':>9} {'streaming':>10}  {'difference [95%]':<26} {'in window':>9}",
    ]
    for first, label in sorted(labels.items()):
        cells = f"{'':>12} {'':>9} {'':>10}  {'':<26}"
        if (r := ranges.get(first)) is not None:
            difference = f"{r.difference:+.4f}{interval(r.difference_interval)}"
            cells = f"{r.tokens:>12,} {r.windows:>9.4f} {r.streaming:>10.4f}  {difference:<26}"
        lines.append(f"{label:>12} {cells} {seen.get(first, ''):>9}".rstrip())
    if (far := positions.far) is None:
        return "\n".join([*lines, f"No document goes on beyond {positions.window} tokens."])
    lines.append(
        f"A context beyond {positions.window} tokens {far.verdict}: {far.difference:+.4f} nats a token"
        f"{interval(far.difference_interval)}\nover the {far.tokens:,} tokens there whose window shows half as many or "
        f"more ({far.streaming:.4f} streaming, {far.windows:.4f} in windows)."
    )
    return "\n".join(lines)


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
