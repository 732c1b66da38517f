"""Loss by position in documents much longer than the training length.

Training reads all files of the corpus but the last one, whose long documents are the test.
"""

import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zstandard

from experiments.reports import table
from experiments.tools import ExperimentError, evaluate_runs, prepare_bytes
from heinsen.files import write_atomically
from heinsen.sweep.runs import RunView

Positions = Mapping[str, Mapping[str, Any]]  # {form: "window" and "ranges" of "by_position" in eval.py's summary}
LONGER = 8  # than what is read of them


def prepare(corpus: Path, out: Path, n_documents: int, n_bytes: int) -> Path:
    """Prepare out/data: train, validation, test, and a split of the first bytes of long documents; return its source.

    The split has the name of its source, which tells how many documents and bytes it has.
    Raises ExperimentError if there are no such documents.
    """
    *train, last = sorted(corpus.glob("train-*.jsonl.zst")) or [None]
    if last is None or not train:
        raise ExperimentError(f"--corpus={corpus}: two files train-*.jsonl.zst are needed, one of them to test")
    file = out / f"long_{n_documents}x{n_bytes}.jsonl"
    if not file.exists():
        found = find_long(last, n_documents, n_bytes)
        if not found:
            raise ExperimentError(f"{last} has no document of {n_bytes * LONGER} bytes: give another --corpus")
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, "".join(json.dumps({"text": text}) + "\n" for text in found))
    prepare_bytes(corpus, out / "data", **{"train": train, file.stem: [file]})
    return file


def find_long(file: Path, n_documents: int, n_bytes: int) -> list[str]:
    """Return the first bytes of the first documents that have `LONGER` times as many."""
    found: list[str] = []
    with zstandard.open(file, "rb") as stream:
        for line in io.TextIOWrapper(stream, encoding="utf-8"):
            text = json.loads(line)["text"].encode()
            if len(text) >= LONGER * n_bytes:
                found.append(text[:n_bytes].decode(errors="ignore"))
            if len(found) == n_documents:
                break
    return found


def measure(
    runs: Mapping[str, RunView], folder: Path, split: str, n_bytes: int, out: Path, parallel: int
) -> dict[str, dict[str, Any]]:
    """Return `Positions` on a split of a run of each form, which is in `folder`. `out` keeps summaries and plots.

    What follows a document where it was cut, after so many bytes, its token of the end, is left out.
    """
    tested = evaluate_runs(folder, [*runs.values()], out, parallel, split)
    found = {form: tested[run.name]["by_position"] for form, run in runs.items()}
    within = lambda ranges: [each for each in ranges if each["first"] <= n_bytes]
    return {form: dict(window=each["window"], ranges=within(each["ranges"])) for form, each in found.items()}


# ---- words ----------------------------------------------------------------------------------------


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
