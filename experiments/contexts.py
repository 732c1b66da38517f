"""Loss by position in documents much longer than the training length, by models trained on windows or on streams.

Training reads all files of the corpus but the last one, whose long documents are the test.
"""

import io
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import zstandard

from experiments import tools
from experiments.contest import Contest, test
from heinsen.figures import place_legend
from heinsen.files import write_atomically
from heinsen.sweep.runs import RunView

Positions = dict[str, dict]  # {contestant: "window" and "ranges" of "by_position" in eval.py's summary}


class Documents(NamedTuple):
    """A split of long documents, cut after as many bytes each."""

    split: str
    n_bytes: int


class Measured(NamedTuple):
    """The models of each kind, trained on windows and on streams: with the state of the step before."""

    windows: Positions
    streams: Positions


def measure(
    contest: Contest,
    names: list[str],
    tuning: list[RunView],
    splits: tuple[Documents, Documents],
    out: Path,
    parallel: int,
    *options: str,
) -> Measured:
    """Train some contestants at their best learning rates on the data of `prepare`, and test them on long documents.

    Those whose state is of constant size are trained on streams, too; the others are tested on the documents' first
    parts. `splits` are those of `prepare`, and `out` is in its folder.
    """
    given = [f"--config.data.path={tools.from_root(out.parent / 'data')}", *options]
    constant = [name for name in names if not contest.train_config(name).model.has_cache]

    def train(kind: str, kinds: list[str], *more: str) -> Positions:
        runs = contest.train(out / kind, kinds, tuning, parallel, *given, *more)
        return by_position(contest, kinds, out / kind, runs, splits, out / f"test_{kind}", parallel)

    return Measured(train("windows", names), train("streams", constant, "--config.carry_state=True"))


def by_position(
    contest: Contest,
    names: Iterable[str],
    folder: Path,
    runs: list[RunView],
    splits: tuple[Documents, Documents],
    out: Path,
    parallel: int,
) -> Positions:
    """Test the runs of a sweep, one of each contestant, on long documents, or on shorter ones where there is a cache.

    What follows a document where it was cut, its token of the end, is left out. Summaries and plots are kept in `out`.
    """
    owner = {contest.runs_of(name, runs)[0].name: name for name in names}
    long, shorter = splits
    documents = {run: shorter if contest.train_config(name).model.has_cache else long for run, name in owner.items()}
    tested = test(out, {folder: runs}, parallel, True, lambda run: documents[run.name].split)
    positions = {}
    for run, name in owner.items():
        found = tested[run]["by_position"]
        ranges = [each for each in found["ranges"] if each["first"] <= documents[run].n_bytes]
        positions[name] = {"window": found["window"], "ranges": ranges}
    return positions


def join(measured: Iterable[Measured]) -> Measured:
    """Return the models of several contests as one."""
    windows, streams = Positions(), Positions()
    for each in measured:
        windows |= each.windows
        streams |= each.streams
    return Measured(windows, streams)


def prepare(corpus: Path, out: Path, documents: int, longest: int) -> tuple[Documents, Documents]:
    """Prepare out/data, and return its splits of long and of shorter documents.

    These have the first `longest` bytes of the first documents that have as many, and an eighth of each. Raises
    ExperimentError if there are no such documents.
    """
    *train, last = sorted(corpus.glob("train-*.jsonl.zst")) or [None]
    if last is None or not train:
        raise tools.ExperimentError(f"--corpus={corpus}: two files train-*.jsonl.zst are needed, one of them to test")
    long = Documents(f"long_{documents}x{longest}", longest)
    shorter = Documents(f"shorter_{documents}x{longest}", longest // 8)
    splits = {"train": train, "validation": [corpus / "validation.jsonl.zst"]}
    splits |= {each.split: [out / f"{each.split}.jsonl"] for each in (long, shorter)}
    if not all(splits[each.split][0].exists() for each in (long, shorter)):
        found = find_long(last, documents, longest)
        if not found:
            raise tools.ExperimentError(f"{last} has no document of {longest} bytes: give another --corpus")
        out.mkdir(parents=True, exist_ok=True)
        for each in (long, shorter):
            lines = (json.dumps({"text": cut(text, each.n_bytes)}) for text in found)
            write_atomically(splits[each.split][0], "".join(f"{line}\n" for line in lines))
    tools.prepare_bytes(splits, out / "data")
    return long, shorter


def find_long(file: Path, documents: int, longest: int) -> list[str]:
    """Return the texts of the first documents of at least `longest` bytes, cut there."""
    found: list[str] = []
    with zstandard.open(file, "rb") as stream:
        for line in io.TextIOWrapper(stream, encoding="utf-8"):
            text = json.loads(line)["text"]
            if len(text.encode()) >= longest:
                found.append(cut(text, longest))
            if len(found) == documents:
                break
    return found


def cut(text: str, n_bytes: int) -> str:
    return text.encode()[:n_bytes].decode(errors="ignore")


# ---- words and figures ----------------------------------------------------------------------------


def table(positions: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a table of the loss at positions beyond half the training length, and its difference to windows."""
    window = next(iter(positions.values()))["window"]
    longest = max((found["ranges"] for found in positions.values()), key=len)
    wanted = [each for each in longest if each["first"] > window / 2]
    span = lambda each: f"{each['first']:,} on" if each["last"] is None else f"to {each['last']:,}"
    cell = lambda each: f"{each['streaming']:.3f} ({each['difference']:+.3f}{significance(each)})"
    rows = []
    for name, found in positions.items():
        own = {each["first"]: each for each in found["ranges"]}
        rows.append([name, *(cell(own[each["first"]]) if each["first"] in own else "" for each in wanted)])
    return tools.table(["", *map(span, wanted)], rows)


def significance(each: Mapping[str, Any]) -> str:
    """Return * where the interval of the difference between streaming and windows excludes 0."""
    interval = each["difference_interval"]
    return "*" if interval is not None and not interval[0] <= 0 <= interval[1] else ""


def plot(path: Path, measured: Measured) -> None:
    """Draw the loss by position, read from the documents' start (lines) and in windows (dots), in nats."""
    figure, axes = tools.make_figure(figsize=(8, 7))
    curves = [(training, name) for training in measured._fields for name in getattr(measured, training)]
    colors = {name: f"C{index}" for index, name in enumerate(measured.windows)}
    for training, name in curves:
        found = getattr(measured, training)[name]
        middles = [math.sqrt(each["first"] * (each["last"] or 2 * each["first"])) for each in found["ranges"]]
        streaming = [each["streaming"] for each in found["ranges"]]
        style = dict(color=colors[name], lw=1.4, ls="-" if training == "streams" else "--")
        axes.plot(middles, streaming, label=f"{name}, trained on {training}", **style)
        if training == "windows":
            axes.plot(middles, [each["windows"] for each in found["ranges"]], ".", ms=4, color=colors[name])
    window = next(iter(measured.windows.values()))["window"]
    axes.axvline(window, color="0.5", lw=0.8, ls=":")
    best = min(each["windows"] for found in measured.windows.values() for each in found["ranges"])
    axes.set(xlabel="position (bytes before it)", ylabel="loss (nats per byte)", ylim=(0.9 * best, 4))
    axes.set_title(f"Dots: in windows of {window}, their training length (dotted line)", fontsize=9)
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    place_legend(figure)
    tools.save_figure(figure, path)
