"""Settings of a preparation, and the check that two preparations of one folder agree on them."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from heinsen.errors import HeinsenError

Provenance = dict[str, Any]  # the JSON record of settings and inputs: `source` in metadata.json


class PreparationError(HeinsenError, ValueError):
    """Inputs or settings from which no token dataset can be made. Finished shards are kept."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that determines the content of a prepared split, apart from the content of its inputs.

    Attributes:
      sources: local files, globs or folders (.jsonl, .jsonl.zst, .txt, .parquet), names of datasets on the
        Hugging Face hub, or "stdlib": the running interpreter's standard library, one file in twenty of which
        belongs to the validation split.
      split: name of the split and of its folder.
      tokenizer: a name that `get_tokenizer` accepts.
      shard_tokens: a shard is closed at the first document boundary at or after this many tokens.
      text_field: the field (.jsonl, hub) or column (.parquet) that holds a document's text.
      source_field: the field or column that names a document's source; dots select nested fields. The names are
        stored beside the shards. A document whose field is missing or is not text has no source. None stores no
        sources.
      max_documents: stop after this many documents.
      max_tokens: stop after the document that reaches this many tokens.
      hub_config: configuration of a hub dataset.
      hub_split: split of a hub dataset. None means `split`.
    """

    sources: tuple[str, ...]
    split: str
    tokenizer: str
    shard_tokens: int = 100_000_000
    text_field: str = "text"
    source_field: str | None = "meta.pile_set_name"
    max_documents: int | None = None
    max_tokens: int | None = None
    hub_config: str | None = None
    hub_split: str | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", self.split):
            raise PreparationError(f"split {self.split!r} must consist of letters, digits, '_', '.' and '-'")
        if not self.sources:
            raise PreparationError("no source given")
        for name in ("shard_tokens", "max_documents", "max_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise PreparationError(f"{name} must be at least 1, got {value}")


def no_text_error(split: str, sources: Sequence[str], num_documents: int, num_skipped: int) -> PreparationError:
    """Return the error of a split without documents, or with empty ones alone."""
    found = f"no text in any of the {num_documents:,} documents" if num_documents else "no documents"
    skipped = f" ({num_skipped} bad ones skipped)" if num_skipped else ""
    return PreparationError(f"{found} for split {split!r} in {', '.join(sources)}{skipped}: give other sources")


def check_same_settings(
    folder: Path,
    state: str,
    before: Provenance,
    now: Provenance,
    num_skipped: int = 0,
    skip_bad_documents: bool = False,
) -> None:
    """Check that the preparation found in `folder` used the settings and inputs of this one.

    Args:
      folder: the folder that was found.
      state: a verb phrase for the error message, such as "was prepared".
      before, now: the provenance recorded in the folder, and that of this call.
      num_skipped: how many bad documents the preparation in the folder skipped.
      skip_bad_documents: whether this call skips them.

    Raises:
      PreparationError: they differ; the message lists how.
    """
    # Versions that stored no sources of documents recorded no `source_field`. Their output stays valid.
    before = {key: value for key, value in now.items() if key == "source_field"} | before
    differences = [
        f"{key}: {before.get(key)!r} before, {now.get(key)!r} now"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    # skip_bad_documents is not part of the settings: it may be turned on after a bad document stopped a preparation.
    if num_skipped and not skip_bad_documents:
        differences.append(f"skip_bad_documents: {num_skipped} skipped before, off now")
    if differences:
        raise PreparationError(
            f"{folder} {state} with other settings: {'; '.join(differences)}. Use the same settings, choose another "
            "--out or --split, or delete the folder to prepare it again."
        )
