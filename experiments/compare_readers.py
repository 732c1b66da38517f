"""Three ways from .jsonl.zst to the same token shards: heinsen's readers, those of `datasets`, and datatrove.

    pip install 'datatrove[io]' orjson
    python experiments/compare_readers.py --corpus=CORPUS --out=runs/readers [--copies=4] [--rounds=3]

CORPUS holds train-*.jsonl.zst. Each way tokenizes --copies copies of it with GPT-2's encoding in two processes:

    heinsen    `heinsen.data.prepare`
    datasets   the same, with the lines read and parsed by `datasets.load_dataset(..., streaming=True)`
    datatrove  its JsonlReader and LocalPipelineExecutor, one task per file, around heinsen's ShardWriter

The ways take turns for --rounds rounds. Then each is killed with SIGKILL once half of its shards are written, and
rerun. Each execution prints a line: tokens/s from start to end of the process, CPU time and peak memory (PSS) of all
its processes, and the first digits of the SHA-256 of the token stream. Needs Linux.
"""

import dataclasses
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from absl import app, flags

from heinsen.errors import exit_on_error
from scripts.cli import parse_flags, show_help

CORPUS = flags.DEFINE_string("corpus", None, "Folder of train-*.jsonl.zst.", required=True)
OUT = flags.DEFINE_string("out", "runs/readers", "Folder of the comparison.")
COPIES = flags.DEFINE_integer("copies", 4, "Copies of the corpus to read.", lower_bound=1)
ROUNDS = flags.DEFINE_integer("rounds", 3, "Executions of each way.", lower_bound=1)
WAY = flags.DEFINE_string("way", None, "Run one way, as the comparison does in a process of its own.")

show_help(__name__)

import numpy as np

from heinsen.data import sources
from heinsen.data.dataset import TOKEN_DTYPE
from heinsen.data.prepare import Settings, prepare
from heinsen.data.shards import PROGRESS_FILE, ShardWriter
from heinsen.data.sources import Numbered, Position, Row
from heinsen.data.tokenize import TokenizedDocument
from heinsen.data.tokenizer import get_tokenizer

SHARD_TOKENS = 2_000_000
WORKERS = 2


def settings(files: Path) -> Settings:
    return Settings(sources=(f"{files}/*.zst",), split="train", tokenizer="gpt2", shard_tokens=SHARD_TOKENS)


def with_heinsen(files: Path, out: Path) -> None:
    prepare(settings(files), out, workers=WORKERS)


def with_datasets(files: Path, out: Path) -> None:
    import datasets

    def read(location: str, settings: Settings) -> Iterator[Numbered]:
        rows = datasets.load_dataset("json", data_files=[location], split="train", streaming=True)
        for number, row in enumerate(rows, start=1):
            yield number, Row(row["text"], row["meta"]["pile_set_name"])

    sources._KINDS.update(dict.fromkeys(sources._KINDS, "hub"))  # the kind whose rows all workers can parse
    sources.READERS["hub"] = dataclasses.replace(sources.READERS["hub"], read=read)
    prepare(settings(files), out, workers=WORKERS)


def with_datatrove(files: Path, out: Path) -> None:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader

    steps = [JsonlReader(str(files), glob_pattern="*.zst"), WritePart(out)]
    tasks = len(list(files.iterdir()))
    LocalPipelineExecutor(steps, tasks=tasks, workers=WORKERS, logging_dir=str(out / "logs")).run()


WAYS = {"heinsen": with_heinsen, "datasets": with_datasets, "datatrove": with_datatrove}


@dataclasses.dataclass(frozen=True)
class WritePart:
    """datatrove's step that tokenizes the documents of one task and writes them as shards."""

    out: Path

    def __call__(self, documents: Iterator[Any], rank: int, world_size: int) -> None:
        tokenizer = get_tokenizer("gpt2")
        folder = self.out / "train" / f"part-{rank:05d}"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / PROGRESS_FILE).open("a+b") as progress:
            writer = ShardWriter(folder, progress)
            if writer.provenance is None:
                writer.begin({})
            done = 0 if writer.position is None else writer.position.number
            for number, document in enumerate(documents, start=1):
                if number <= done:
                    continue
                tokens = np.append(tokenizer.encode(document.text), tokenizer.eot_id).astype(TOKEN_DTYPE)
                source = document.metadata["meta"]["pile_set_name"]
                writer.add(TokenizedDocument(tokens, len(document.text.encode()), source))
                writer.position = Position(0, number)
                if writer.pending_tokens >= SHARD_TOKENS:
                    writer.close_shard()
            writer.close_shard()


@dataclasses.dataclass(frozen=True)
class Execution:
    seconds: float
    cpu_seconds: float
    peak_mib: float


def execute(way: str, out: Path, kill_at: int | None = None) -> Execution:
    """Run one way in a session of its own; kill all its processes once `kill_at` shards are written."""
    command = [sys.executable, __file__, f"--corpus={CORPUS.value}", f"--out={OUT.value}", f"--way={way}"]
    start, peak, cpu = time.monotonic(), 0.0, {}
    with open(f"{out}.log", "ab") as log:
        process = subprocess.Popen(command, start_new_session=True, stdout=log, stderr=log)
    while process.poll() is None:
        members = session(process.pid)
        cpu |= members
        peak = max(peak, sum(map(proportional_mib, members)))
        if kill_at is not None and len(find_shards(out)) >= kill_at:
            for member in session(process.pid):
                os.kill(member, signal.SIGKILL)
        time.sleep(0.05)
    if kill_at is None and process.returncode:
        sys.exit(f"error: {way} failed; see {out}.log")
    return Execution(time.monotonic() - start, sum(cpu.values()), peak)


def session(leader: int) -> dict[int, float]:
    """CPU seconds so far of each process of a session."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:  # ended meanwhile
            continue
        if int(fields[3]) == leader:
            found[int(path.parent.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def proportional_mib(process: int) -> float:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:  # ended meanwhile
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def find_shards(out: Path) -> list[Path]:
    return sorted(out.rglob("shard-?????.npy"))


def describe_stream(out: Path) -> tuple[str, int]:
    """SHA-256 and length of the stream of tokens."""
    shards = [np.load(path) for path in find_shards(out)]
    return hashlib.sha256(b"".join(shard.tobytes() for shard in shards)).hexdigest(), sum(map(len, shards))


def measure(way: str, out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    found = execute(way, out)
    sha256, num_tokens = describe_stream(out)
    print(
        f"{way:10}{num_tokens / found.seconds:12,.0f} tokens/s  CPU {found.cpu_seconds:5.1f} s  "
        f"peak {found.peak_mib:4.0f} MiB  {sha256[:8]}",
        flush=True,
    )


def measure_resumption(way: str, out: Path) -> None:
    num_shards = len(find_shards(out))
    shutil.rmtree(out)
    execute(way, out, kill_at=num_shards // 2)
    before = {path: path.stat().st_mtime_ns for path in find_shards(out)}
    found = execute(way, out)
    rewritten = sum(path.stat().st_mtime_ns != stamp for path, stamp in before.items())
    print(
        f"{way:10}killed with {len(before)} of {num_shards} shards: rerun took {found.seconds:.1f} s, rewrote "
        f"{rewritten} of them  {describe_stream(out)[0][:8]}",
        flush=True,
    )


def main(argv: list[str]) -> None:
    with exit_on_error():
        compare(Path(OUT.value))


def compare(out: Path) -> None:
    files = out / "files"
    if WAY.value is not None:
        WAYS[WAY.value](files, out / WAY.value)
        return
    shutil.rmtree(files, ignore_errors=True)
    files.mkdir(parents=True)
    for copy in range(COPIES.value):
        for path in Path(CORPUS.value).resolve().glob("train-*.jsonl.zst"):
            os.link(path, files / f"{copy}-{path.name}")
    for _ in range(ROUNDS.value):
        for way in WAYS:
            measure(way, out / way)
    for way in WAYS:
        measure_resumption(way, out / way)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
