"""Prepare a token dataset: documents in, token shards out.

    python scripts/prepare_data.py --source=stdlib --tokenizer=bytes --out=data/stdlib \\
        --split=train,validation
    python scripts/prepare_data.py --source='pile/train/*.jsonl.zst' --tokenizer=gpt2 --out=data/pile \\
        --split=train
    python scripts/prepare_data.py --source=monology/pile-uncopyrighted --tokenizer=gpt2 --out=data/pile \\
        --split=train
    python scripts/prepare_data.py --source='corpus/train-*' --tokenizer=mine/tokenizer.json --out=data/mine \\
        --split=train

If a preparation is interrupted, rerun the same command to resume.

--verify reads every finished shard again. Without sources it does nothing else:

    python scripts/prepare_data.py --verify --out=data/pile --split=train,validation
"""

import functools
import sys
from collections.abc import Iterator
from pathlib import Path

from absl import app, flags

from heinsen.data.dataset import TokenDataset
from heinsen.data.preparation import PreparationError, Settings, prepare
from heinsen.data.sources import STDLIB, check_disjoint
from heinsen.data.tokenizer import TOKENIZER_NAMES
from heinsen.errors import exit_on_error
from scripts.cli import parse_flags, refuse_address

_SOURCE = flags.DEFINE_multi_string(
    "source",
    None,
    "A local file, glob or folder (.jsonl, .jsonl.zst, .jsonl.gz, .txt, .parquet), the name of a dataset on the "
    f"Hugging Face hub, or '{STDLIB}' for the running Python's standard library. Plain arguments are further sources. "
    "One is required, unless --verify is given.",
)
_OUT = flags.DEFINE_string("out", None, "Folder of the dataset; each split is a folder in it.", required=True)
_SPLIT = flags.DEFINE_list(
    "split",
    None,
    "Name of the split. Several, separated by commas, for 'stdlib' and hub datasets, which have splits of their own.",
    required=True,
)
_TOKENIZER = flags.DEFINE_string(
    "tokenizer",
    None,
    f"{', '.join(TOKENIZER_NAMES)}, or the path of a tokenizer.json of Hugging Face's tokenizers library. "
    "Required, unless --verify is given.",
)
flags.register_validator(
    "tokenizer",
    lambda name: name is None or name in TOKENIZER_NAMES or name.endswith(".json"),
    f"expected {', '.join(TOKENIZER_NAMES)}, or the path of a tokenizer.json",
)
_END_OF_TEXT = flags.DEFINE_string(
    "end_of_text", None, "The special token of a tokenizer.json that ends a document (default: its only one)."
)
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

_RESUME = "Finished shards are kept; rerun the same command to resume."


def _check_flags(sources: tuple[str, ...]) -> None:
    if not sources and not _VERIFY.value:
        raise PreparationError("no source given: --source to prepare a dataset, or --verify for a finished one")
    if sources and _TOKENIZER.value is None:
        raise PreparationError(
            f"no tokenizer given: --tokenizer={' or --tokenizer='.join((*TOKENIZER_NAMES, 'FILE.json'))}"
        )


def _datasets(sources: tuple[str, ...]) -> Iterator[TokenDataset]:
    """Yield the prepared datasets; without sources, those that are there."""
    if not sources:
        yield from (TokenDataset(Path(_OUT.value) / split) for split in _SPLIT.value)
        return
    splits = [
        Settings(
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
            end_of_text=_END_OF_TEXT.value,
        )
        for split in _SPLIT.value
    ]
    check_disjoint(splits)
    for settings in splits:
        yield prepare(settings, _OUT.value, workers=_WORKERS.value, skip_bad_documents=_SKIP.value)


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
