"""Loss by position in documents much longer than the training length.

Training reads all files of the corpus but the last one, whose long documents are the test.
"""

import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import zstandard
from matplotlib.figure import Figure

from experiments.reports import make_figure, table
from experiments.tools import Contest, ExperimentError, evaluate_runs, prepare_bytes
from heinsen.files import write_atomically
from heinsen.sweep.runs import RunView

Positions = Mapping[str, Mapping[str, Any]]  # {contestant: "window" and "ranges" of "by_position" in eval.py's summary}


class Documents(NamedTuple):
    """The splits of long documents: the first bytes of each, and an eighth of them for models whose cache grows."""

    long: str
    shorter: str
    n_bytes: int


def prepare(corpus: Path, out: Path, n_documents: int, n_bytes: int) -> Documents:
    """Prepare out/data: train, validation, test, and two splits of the first documents with as many bytes.

    Raises ExperimentError if there are no such documents.
    """
    *train, last = sorted(corpus.glob("train-*.jsonl.zst")) or [None]
    if last is None or not train:
        raise ExperimentError(f"--corpus={corpus}: two files train-*.jsonl.zst are needed, one of them to test")
    documents = Documents(f"long_{n_documents}x{n_bytes}", f"shorter_{n_documents}x{n_bytes}", n_bytes)
    files = {split: out / f"{split}.jsonl" for split in documents[:2]}
    if not all(file.exists() for file in files.values()):
        found = find_long(last, n_documents, n_bytes)
        if not found:
            raise ExperimentError(f"{last} has no document of {n_bytes} bytes: give another --corpus")
        for file, length in zip(files.values(), (n_bytes, n_bytes // 8), strict=True):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, "".join(json.dumps({"text": cut(text, length)}) + "\n" for text in found))
    prepare_bytes(corpus, out / "data", **{"train": train, **{split: [file] for split, file in files.items()}})
    return documents


def find_long(file: Path, n_documents: int, n_bytes: int) -> list[str]:
    """Return the texts of the first documents of at least `n_bytes`, cut there."""
    found: list[str] = []
    with zstandard.open(file, "rb") as stream:
        for line in io.TextIOWrapper(stream, encoding="utf-8"):
            text = json.loads(line)["text"]
            if len(text.encode()) >= n_bytes:
                found.append(cut(text, n_bytes))
            if len(found) == n_documents:
                break
    return found


def cut(text: str, n_bytes: int) -> str:
    return text.encode()[:n_bytes].decode(errors="ignore")


def measure(
    contest: Contest, owners: Mapping[str, RunView], folder: Path, documents: Documents, out: Path, parallel: int
) -> dict[str, dict[str, Any]]:
    """Return `Positions` of a run of each contestant, which is in `folder`. Summaries and plots are kept in `out`.

    What follows a document where it was cut, its token of the end, is left out.
    """
    has_cache = {name: contest.train_config(name).model.has_cache for name in owners}
    splits = {run.name: documents.shorter if has_cache[name] else documents.long for name, run in owners.items()}
    tested = evaluate_runs(folder, [*owners.values()], out, parallel, splits)
    positions = {}
    for name, run in owners.items():
        found, last = tested[run.name]["by_position"], documents.n_bytes // (8 if has_cache[name] else 1)
        ranges = [each for each in found["ranges"] if each["first"] <= last]
        positions[name] = dict(window=found["window"], ranges=ranges)
    return positions


# ---- words and figures ----------------------------------------------------------------------------


def positions_table(positions: Positions) -> list[str]:
    """Return a table of the loss at positions beyond half the training length, and its difference to windows."""
    window = next(iter(positions.values()))["window"]
    longest = max((found["ranges"] for found in positions.values()), key=len)
    wanted = [each for each in longest if each["first"] > window / 2]
    span = lambda each: f"{each['first']:,} on" if each["last"] is None else f"{each['first']:,} to {each['last']:,}"
    cell = lambda each: f"{each['streaming']:.3f} ({each['difference']:+.3f}{significance(each)})"
    rows = []
    for name, found in positions.items():
        own = {each["first"]: each for each in found["ranges"]}
        rows.append([name, *(cell(own[each["first"]]) if each["first"] in own else "" for each in wanted)])
    return table(["", *map(span, wanted)], rows)


def significance(each: Mapping[str, Any]) -> str:
    """Return * where the interval of the difference between streaming and windows excludes 0."""
    interval = each["difference_interval"]
    return "*" if interval is not None and not interval[0] <= 0 <= interval[1] else ""


def middles(found: Mapping[str, Any]) -> list[float]:
    """Return the geometric middle of each range of positions."""
    return [math.sqrt(each["first"] * (each["last"] or 2 * each["first"])) for each in found["ranges"]]


def draw(positions: Positions) -> Figure:
    """Draw the loss by position in nats. Lines: read from the documents' start. Dots: in windows."""
    figure, axes = make_figure(figsize=(8, 7))
    for index, (name, found) in enumerate(positions.items()):
        color = f"C{index}"
        axes.plot(middles(found), [each["streaming"] for each in found["ranges"]], lw=1.4, color=color, label=name)
        axes.plot(middles(found), [each["windows"] for each in found["ranges"]], ".", ms=4, color=color)
    window = next(iter(positions.values()))["window"]
    axes.axvline(window, color="0.5", lw=0.8, ls=":")
    best = min(each["windows"] for found in positions.values() for each in found["ranges"])
    axes.set(xlabel="position (bytes before it)", ylabel="loss (nats per byte)", ylim=(0.9 * best, 4))
    axes.set_title(f"Dots: in windows of {window}, their training length (dotted line)", fontsize=9)
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    return figure
