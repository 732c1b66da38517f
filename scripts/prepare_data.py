"""Prepare a token dataset: documents in, token shards out.

    python scripts/prepare_data.py --source=stdlib --tokenizer=bytes --out=data/stdlib \\
        --split=train,validation
    python scripts/prepare_data.py --source='pile/train/*.jsonl.zst' --tokenizer=gpt2 --out=data/pile \\
        --split=train
    python scripts/prepare_data.py --source=monology/pile-uncopyrighted --tokenizer=gpt2 --out=data/pile \\
        --split=train

If a preparation is interrupted, rerun the same command to resume.

Several machines with a common file system share the work by --shard_index=I --shard_count=N, I from 0 to N - 1: each
takes every N-th input file, and the last to finish joins the parts. If one stops, rerun its command on any machine.

On a SLURM cluster, from a login node, --launcher=slurm --tasks=N does that in N jobs, and waits for them.

--verify reads every finished shard again. Without sources it does nothing else:

    python scripts/prepare_data.py --verify --out=data/pile --split=train,validation
"""

import functools
import sys
from collections.abc import Iterator
from pathlib import Path

from absl import app, flags

from heinsen.data.dataset import TokenDataset
from heinsen.data.inputs import STDLIB, check_disjoint
from heinsen.data.prepare import PreparationError, Settings, prepare, prepare_part
from heinsen.data.tokenizer import TOKENIZER_NAMES
from heinsen.errors import exit_on_error
from scripts.cli import parse_flags, refuse_address
from scripts.job_array import run_array

_SOURCE = flags.DEFINE_multi_string(
    "source",
    None,
    "A local file, glob or folder (.jsonl, .jsonl.zst, .txt, .parquet), the name of a dataset on the Hugging "
    f"Face hub, or '{STDLIB}' for the running Python's standard library. Plain arguments are further sources.",
)
_OUT = flags.DEFINE_string("out", None, "Folder of the dataset; each split is a folder in it.", required=True)
_SPLIT = flags.DEFINE_list(
    "split",
    None,
    "Name of the split. Several, separated by commas, for 'stdlib' and hub datasets, which have splits of their own.",
    required=True,
)
_TOKENIZER = flags.DEFINE_enum("tokenizer", None, TOKENIZER_NAMES, "The tokenizer.")
_WORKERS = flags.DEFINE_integer(
    "workers", None, "Tokenizing processes (default: one per CPU; 1 for small inputs).", lower_bound=1
)
_SHARD_TOKENS = flags.DEFINE_integer(
    "shard_tokens", 100_000_000, "Close a shard after this many tokens.", lower_bound=1
)
_TEXT_FIELD = flags.DEFINE_string("text_field", "text", "Field or column that holds a document's text.")
_SOURCE_FIELD = flags.DEFINE_string(
    "source_field",
    "meta.pile_set_name",
    "Field or column that names a document's source, stored for evaluation by source; empty: store no sources.",
)
_MAX_DOCUMENTS = flags.DEFINE_integer("max_documents", None, "Stop after this many documents.", lower_bound=1)
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", None, "Stop once this many tokens are reached.", lower_bound=1)
_SKIP = flags.DEFINE_bool("skip_bad_documents", False, "Count and leave out bad documents instead of stopping.")
_HUB_CONFIG = flags.DEFINE_string("hub_config", None, "Configuration of a hub dataset.")
_HUB_SPLIT = flags.DEFINE_string("hub_split", None, "Split of a hub dataset (default: --split).")
_VERIFY = flags.DEFINE_bool("verify", False, "Read the finished shards again and compare their SHA-256.")
_SHARD_INDEX = flags.DEFINE_integer("shard_index", None, "Index of this machine, from 0.", lower_bound=0)
_SHARD_COUNT = flags.DEFINE_integer("shard_count", None, "Number of machines that prepare the split.", lower_bound=1)
_LAUNCHER = flags.DEFINE_enum("launcher", "local", ["local", "slurm"], "slurm: --tasks jobs share the work.")
_TASKS = flags.DEFINE_integer("tasks", None, "slurm: number of jobs; each takes a part of the sources.", lower_bound=1)
_PARTITION = flags.DEFINE_string("partition", None, "slurm: partition of the jobs.")
_TIME = flags.DEFINE_string("time", "24:00:00", "slurm: limit per job, in sbatch's format.")
_CPUS = flags.DEFINE_integer(
    "cpus_per_task", 8, "slurm: CPU cores per job, a tokenizing process on each.", lower_bound=1
)


_RESUME = "Finished shards are kept; rerun the same command to resume."


def _check_flags(sources: tuple[str, ...]) -> None:
    index, count = _SHARD_INDEX.value, _SHARD_COUNT.value
    if not sources and not _VERIFY.value:
        raise PreparationError("no source given: --source to prepare a dataset, or --verify for a finished one")
    if not sources and (index, count) != (None, None):
        raise PreparationError("--verify without sources is for whole splits: no --shard_index, no --shard_count")
    if sources and _TOKENIZER.value is None:
        raise PreparationError(f"no tokenizer given: --tokenizer={' or --tokenizer='.join(TOKENIZER_NAMES)}")
    if (index is None) != (count is None):
        raise PreparationError(f"--shard_index={index} and --shard_count={count}: give both or neither")
    on_slurm = _LAUNCHER.value == "slurm"
    if on_slurm and (_TASKS.value is None or index is not None or not sources):
        raise PreparationError("--launcher=slurm needs --tasks=N and sources, and no --shard_index")
    if on_slurm and (_MAX_DOCUMENTS.present or _MAX_TOKENS.present):
        raise PreparationError(
            "--max_documents and --max_tokens would have to be counted over all jobs: leave them out"
        )
    if _TASKS.value is not None and not on_slurm:
        raise PreparationError("--tasks goes with --launcher=slurm")


def _settings(sources: tuple[str, ...], split: str) -> Settings:
    return Settings(
        sources=sources,
        split=split,
        tokenizer=_TOKENIZER.value,
        shard_tokens=_SHARD_TOKENS.value,
        text_field=_TEXT_FIELD.value,
        source_field=_SOURCE_FIELD.value or None,
        max_documents=_MAX_DOCUMENTS.value,
        max_tokens=_MAX_TOKENS.value,
        hub_config=_HUB_CONFIG.value,
        hub_split=_HUB_SPLIT.value,
    )


def _prepare(settings: Settings) -> TokenDataset:
    """Prepare a split, or this machine's part of it."""
    options = {"workers": _WORKERS.value, "skip_bad_documents": _SKIP.value}
    if _SHARD_COUNT.value is None:
        return prepare(settings, _OUT.value, **options)
    return prepare_part(settings, _OUT.value, _SHARD_INDEX.value, _SHARD_COUNT.value, **options)


def _prepare_on_slurm(sources: tuple[str, ...]) -> None:
    """Prepare parts of the splits in the tasks of a SLURM array; the last of them joins the parts."""
    given = (_TOKENIZER, _SHARD_TOKENS, _TEXT_FIELD, _SOURCE_FIELD, _SKIP, _HUB_CONFIG, _HUB_SPLIT)
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        f"--out={_OUT.value}",
        f"--split={','.join(_SPLIT.value)}",
    ]
    command += [f"--{flag.name}={flag.value}" for flag in given if flag.present]
    command += [f"--source={source}" for source in sources] + [f"--workers={_WORKERS.value or _CPUS.value}"]
    options = [f"--cpus-per-task={_CPUS.value}", f"--time={_TIME.value}", f"--chdir={Path.cwd()}"]
    options += [f"--partition={_PARTITION.value}"] if _PARTITION.value else []
    run_array(command, _TASKS.value, Path(_OUT.value) / "jobs" / "-".join(_SPLIT.value), options)


def _datasets(sources: tuple[str, ...]) -> Iterator[TokenDataset]:
    """Yield the prepared datasets; without sources, those that are there."""
    here = lambda: (TokenDataset(Path(_OUT.value) / split) for split in _SPLIT.value)
    if _LAUNCHER.value == "slurm":
        _prepare_on_slurm(sources)
        for dataset in here():
            documents, tokens = dataset.num_documents, len(dataset)
            print(f"{dataset.path}: {documents:,} documents, {tokens:,} tokens", file=sys.stderr)
    if not sources or _LAUNCHER.value == "slurm":
        yield from here()
        return
    splits = [_settings(sources, split) for split in _SPLIT.value]
    check_disjoint(splits)
    yield from map(_prepare, splits)


def main(argv: list[str]) -> None:
    sources = (*(_SOURCE.value or ()), *argv[1:])
    refuse_address("out")
    with exit_on_error(on_interrupt=f"interrupted. {_RESUME}", on_os_error=_RESUME):
        _check_flags(sources)
        for dataset in _datasets(sources):
            if _VERIFY.value:
                dataset.verify()
                print(f"{dataset.path}: every shard matches its SHA-256", file=sys.stderr)


if __name__ == "__main__":
    app.run(main, flags_parser=functools.partial(parse_flags, may_be_empty=["source_field"], takes_arguments=True))
