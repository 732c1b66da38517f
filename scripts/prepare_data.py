"""Prepares a token dataset: documents in, token shards out.

    python scripts/prepare_data.py --source=stdlib --tokenizer=bytes --out=data/stdlib \\
        --split=train,validation
    python scripts/prepare_data.py --source='pile/train/*.jsonl.zst' --tokenizer=gpt2 --out=data/pile \\
        --split=train
    python scripts/prepare_data.py --source=monology/pile-uncopyrighted --tokenizer=gpt2 --out=data/pile \\
        --split=train

An interrupted preparation goes on where it stopped when the same command is given again.

Several machines with a common file system share the work by --shard_index=I --shard_count=N, I from 0 to N - 1: each
takes every N-th input file, and the last to finish joins the parts. If one stopped, give its command again, anywhere.

--verify reads every finished shard again; without sources it does nothing else:

    python scripts/prepare_data.py --verify --out=data/pile --split=train,validation
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from absl import app, flags

from heinsen.data.dataset import DatasetError, TokenDataset
from heinsen.data.prepare import STDLIB, PreparationError, Settings, find_inputs, prepare, prepare_part
from heinsen.data.tokenizer import TOKENIZER_NAMES

_SOURCE = flags.DEFINE_multi_string(
    "source",
    None,
    "A local file, glob or folder (.jsonl, .jsonl.zst, .txt, .parquet), the name of a dataset on the Hugging "
    f"Face hub, or '{STDLIB}' for the running Python's own library. More may follow as plain arguments.",
)
_OUT = flags.DEFINE_string("out", None, "Folder of the dataset; each split is a folder in it.", required=True)
_SPLIT = flags.DEFINE_list(
    "split",
    None,
    "Name of the split. Several, separated by commas, for 'stdlib' and hub datasets, which have their own.",
    required=True,
)
_TOKENIZER = flags.DEFINE_enum("tokenizer", None, TOKENIZER_NAMES, "The tokenizer.")
_WORKERS = flags.DEFINE_integer(
    "workers", None, "Tokenising processes (default: one a CPU; 1 for small inputs).", lower_bound=1
)
_SHARD_TOKENS = flags.DEFINE_integer("shard_tokens", 100_000_000, "Close a shard after so many tokens.", lower_bound=1)
_TEXT_FIELD = flags.DEFINE_string("text_field", "text", "Field or column that holds a document's text.")
_SOURCE_FIELD = flags.DEFINE_string(
    "source_field",
    "meta.pile_set_name",
    "Field or column that names a document's source, kept for evaluation by source; empty: keep none.",
)
_MAX_DOCUMENTS = flags.DEFINE_integer("max_documents", None, "Stop after so many documents.", lower_bound=1)
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", None, "Stop once so many tokens are reached.", lower_bound=1)
_SKIP = flags.DEFINE_bool("skip_bad_documents", False, "Count and leave out bad documents instead of stopping.")
_HUB_CONFIG = flags.DEFINE_string("hub_config", None, "Configuration of a hub dataset.")
_HUB_SPLIT = flags.DEFINE_string("hub_split", None, "Split of a hub dataset (default: --split).")
_VERIFY = flags.DEFINE_bool("verify", False, "Read the finished shards again and compare their SHA-256.")
_SHARD_INDEX = flags.DEFINE_integer("shard_index", None, "Which machine this is, from 0.", lower_bound=0)
_SHARD_COUNT = flags.DEFINE_integer("shard_count", None, "How many machines prepare the split.", lower_bound=1)


def _check_disjoint(splits: list[Settings]) -> None:
    """Local files, and a hub dataset with --hub_split, are the same for every split."""
    names = [{i.name for i in find_inputs(s) if i.kind != "hub" or s.hub_split} for s in splits]
    if shared := sorted(set.intersection(*names)):
        raise PreparationError(f"{shared[0]} would be in every split: prepare one --split a call")


def _prepare(sources: tuple[str, ...]) -> Iterator[TokenDataset]:
    """The prepared splits, one after the other; of a part, the whole split if all of it is finished."""
    if _TOKENIZER.value is None:
        raise PreparationError(f"no tokenizer given: --tokenizer={' or --tokenizer='.join(TOKENIZER_NAMES)}")
    if (_SHARD_INDEX.value is None) != (_SHARD_COUNT.value is None):
        raise PreparationError(
            f"--shard_index={_SHARD_INDEX.value} and --shard_count={_SHARD_COUNT.value}: give both or neither"
        )
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
        )
        for split in _SPLIT.value
    ]
    if len(splits) > 1:
        _check_disjoint(splits)
    for settings in splits:
        options = dict(workers=_WORKERS.value, skip_bad_documents=_SKIP.value)
        if _SHARD_COUNT.value is None:
            yield prepare(settings, _OUT.value, **options)
        else:
            yield prepare_part(settings, _OUT.value, _SHARD_INDEX.value, _SHARD_COUNT.value, **options)


def main(argv: list[str]) -> None:
    sources = (*(_SOURCE.value or ()), *argv[1:])
    try:
        if not sources and not _VERIFY.value:
            raise PreparationError("no source given: --source to prepare a dataset, or --verify for a finished one")
        if not sources and (_SHARD_INDEX.value, _SHARD_COUNT.value) != (None, None):
            raise PreparationError("--verify without sources is for whole splits: no --shard_index, no --shard_count")
        opened = (TokenDataset(Path(_OUT.value) / split) for split in _SPLIT.value)
        for dataset in _prepare(sources) if sources else opened:
            if _VERIFY.value:
                dataset.verify()
                print(f"{dataset.path}: every shard matches its SHA-256", file=sys.stderr)
    except (PreparationError, DatasetError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; finished shards are kept, and the same command goes on after them")


if __name__ == "__main__":
    app.run(main)
