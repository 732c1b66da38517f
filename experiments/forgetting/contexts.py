"""Loss by position in documents much longer than the training length, by models trained on windows or on streams.

Training reads all files of the corpus but the last one, whose long documents are the test.
"""

import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import zstandard

from experiments import tools
from experiments.contest import Contest, test
from heinsen.files import write_atomically
from heinsen.sweep.runs import RunView

Positions = dict[str, dict]  # {contestant: "by_position" of eval.py's summary}


class Measured(NamedTuple):
    """The models of each kind, trained on windows and on streams: with the state of the step before."""

    windows: Positions
    streams: Positions


def measure(
    contest: Contest,
    names: list[str],
    tuning: list[RunView],
    splits: tuple[str, str],
    out: Path,
    parallel: int,
    *options: str,
) -> Measured:
    """Train some contestants at their best learning rates on the data of `prepare`, and test them on long documents.

    Those whose state is of constant size are trained on streams, too; the others are tested on the documents' first
    parts. `splits` are those of `prepare`, and `out` is in its folder.
    """
    given = [f"--config.data.path={(out.parent / 'data').absolute()}", *options]
    constant = [name for name in names if not contest.train_config(name).model.has_cache]

    def split_of(run: RunView) -> str:
        long, shorter = splits
        return long if any(contest.runs_of(name, [run]) for name in constant) else shorter

    def train(kind: str, kinds: list[str], *more: str) -> Positions:
        runs = contest.train(out / kind, kinds, tuning, parallel, *given, *more)
        tested = test(out / f"test_{kind}", {out / kind: runs}, parallel, True, split_of)
        return {name: tested[run.name]["by_position"] for name in kinds for run in contest.runs_of(name, runs)}

    return Measured(train("windows", names), train("streams", constant, "--config.carry_state=True"))


def join(measured: Iterable[Measured]) -> Measured:
    """Return the models of several contests as one."""
    windows, streams = Positions(), Positions()
    for each in measured:
        windows |= each.windows
        streams |= each.streams
    return Measured(windows, streams)


def prepare(corpus: Path, out: Path, documents: int, longest: int) -> tuple[str, str]:
    """Prepare out/data, and return the names of its splits of long and of shorter documents.

    These have the first `longest` bytes of the first documents that have as many, and an eighth of each. Raises
    ExperimentError if there are no such documents.
    """
    *train, last = sorted(corpus.glob("train-*.jsonl.zst")) or [None]
    if last is None or not train:
        raise tools.ExperimentError(f"--corpus={corpus}: two files train-*.jsonl.zst are needed, one of them to test")
    sizes = {f"long_{documents}x{longest}": longest, f"shorter_{documents}x{longest}": longest // 8}
    splits = {"train": train, "validation": [corpus / "validation.jsonl.zst"]}
    splits |= {split: [out / f"{split}.jsonl"] for split in sizes}
    if not all(splits[split][0].exists() for split in sizes):
        found = find_long(last, documents, longest)
        if not found:
            raise tools.ExperimentError(f"{last} has no document of {longest} bytes: give another --corpus")
        out.mkdir(parents=True, exist_ok=True)
        for split, n_bytes in sizes.items():
            lines = (json.dumps({"text": cut(text, n_bytes)}) for text in found)
            write_atomically(splits[split][0], "".join(f"{line}\n" for line in lines))
    tools.prepare_bytes(splits, out / "data")
    long, shorter = sizes
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
