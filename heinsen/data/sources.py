"""Sources of a preparation: the files and hub datasets that settings name, and their documents in order."""

import dataclasses
import glob
import hashlib
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from heinsen.data.readers import READERS, Content, PreparationError, Settings
from heinsen.files import file_sha256, name_errors
from heinsen.progress import track
from heinsen.quantities import count

STDLIB = "stdlib"
STDLIB_SPLITS = ("train", "validation")
_KINDS = {suffix: kind for kind, reader in READERS.items() for suffix in reader.suffixes}
_LOST = "lost+found"  # of a file system's root, for the administrator alone
_KNOWN_ENDINGS = f"known endings are {', '.join(_KINDS)}"


class InputPosition(NamedTuple):
    """A document: `input` indexes the inputs, `number` counts lines or rows from 1."""

    input: int
    number: int


@dataclasses.dataclass(frozen=True)
class Input:
    """One file or hub dataset.

    Attributes:
      kind: a key of `READERS`.
      name: for messages and for the comparison of settings.
      location: path of the file, or name of the hub dataset.
      status: of the file; None for a hub dataset.
    """

    kind: str
    name: str
    location: str
    status: os.stat_result | None = None

    @property
    def is_file(self) -> bool:
        return self.status is not None

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return 0 if self.status is None else self.status.st_size

    def where(self, number: int) -> str:
        """Return the place of a document, for messages."""
        return self.name + READERS[self.kind].place.format(number)


class InputBlock(NamedTuple):
    """A block that the reader `kind` read from input `input`."""

    input: int
    kind: str
    numbers: range
    content: Content


def read_blocks(inputs: Sequence[Input], settings: Settings, after: InputPosition) -> Iterator[InputBlock]:
    """Yield the inputs' blocks in order, without those that end at position `after` or before."""
    for index in range(after.input, len(inputs)):
        kind, location = inputs[index].kind, inputs[index].location
        with name_errors(Path(location)):
            for numbers, content in READERS[kind].read(location, settings):
                if (index, numbers[-1]) > after:
                    yield InputBlock(index, kind, numbers, content)


def find_inputs(settings: Settings) -> list[Input]:
    """Return the inputs of a split in reading order. Raises PreparationError if there are none, or one is repeated."""
    inputs = [found for source in settings.sources for found in _find_source(source, settings)]
    names: dict[str, str] = {}
    for each in inputs:
        key = os.path.realpath(each.location) if each.is_file else each.name
        if key in names:
            link = f", which is the same file as {names[key]}" if names[key] != each.name else ""
            raise PreparationError(f"given more than once by the sources: {each.name}{link}")
        names[key] = each.name
    return inputs


def check_disjoint(splits: Sequence[Settings]) -> None:
    """Raise PreparationError if an input would be in every one of several splits.

    Local files are the same for every split, and so is a hub dataset with `hub_split`.
    """
    if len(splits) < 2:
        return
    names = [{i.name for i in find_inputs(s) if i.is_file or s.hub_split} for s in splits]
    if shared := sorted(set.intersection(*names)):
        raise PreparationError(f"{shared[0]} would be in every split: give one --split per call")


def describe_inputs(inputs: Sequence[Input]) -> dict[str, Any]:
    """Return what identifies the inputs when settings are compared: number, size, and a hash of names and sizes."""
    listing = [(i.name, i.size) for i in inputs]
    return {
        "files": len(listing),
        "bytes": sum(size for _, size in listing),
        "sha256": hashlib.sha256(json.dumps(listing).encode()).hexdigest(),
    }


def hash_times(inputs: Sequence[Input]) -> str:
    """Return a hash of the times at which the files were last modified."""
    times = [i.status.st_mtime_ns for i in inputs if i.status is not None]
    return hashlib.sha256(json.dumps(times).encode()).hexdigest()


def hash_contents(inputs: Sequence[Input]) -> list[str]:
    """Return the SHA-256 of each file. Shows its progress."""
    each_size = lambda i: i.size
    tracked = track(inputs, "hashing the inputs", sum(map(each_size, inputs)), each_size, "bytes")
    return [file_sha256(Path(each.location)) for each in tracked if each.is_file]


def _find_source(source: str, settings: Settings) -> list[Input]:
    if source == STDLIB:
        return _find_stdlib(settings.split)
    path = Path(source)
    if path.is_file():
        if _kind(path) is None:
            raise PreparationError(f"source '{source}' is of no known kind: {_KNOWN_ENDINGS}")
        files = [path]
    elif path.is_dir():
        files = _choose_files(source, _walk(path))
    elif re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", source) and _kind(path) is None:
        return [Input("hub", source, source)]
    else:
        files = _choose_files(source, _match(source))
    if not files:
        raise PreparationError(
            f"no file matches source '{source}' (of {', '.join(settings.sources)}); {_KNOWN_ENDINGS}"
        )
    return [Input(str(_kind(path)), str(path), str(path), path.stat()) for path in files]


def _kind(path: Path) -> str | None:
    return next((kind for suffix, kind in _KINDS.items() if path.name.lower().endswith(suffix)), None)


def _match(pattern: str) -> Iterator[tuple[Path, bool]]:
    """Yield (file, whether it is hidden) of the files and folders that a glob matches."""
    for path in map(Path, glob.glob(pattern, recursive=True)):
        if _LOST in path.parts and _LOST not in pattern:
            yield path, True
        elif path.is_dir():
            yield from _walk(path)
        else:
            yield path, False


def _walk(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Yield (file, whether it is hidden) below a folder, also through symbolic links that do not lead in a circle.

    Of a hidden folder, which need not be readable, only itself.
    """

    def fail(error: OSError) -> None:
        raise error

    for path, folders, names in os.walk(folder, followlinks=True, onerror=fail):
        if os.path.islink(path) and os.path.realpath(path) in map(os.path.realpath, Path(path).absolute().parents):
            folders.clear()
            continue
        for name in filter(_is_hidden, [*folders]):
            folders.remove(name)
            yield Path(path, name), True
        yield from ((Path(path, name), _is_hidden(name)) for name in names)


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == _LOST


def _choose_files(source: str, found: Iterable[tuple[Path, bool]]) -> list[Path]:
    """Return the files of known kinds that are not hidden, sorted. Names the others, in one line on stderr."""
    files: list[Path] = []
    unread: dict[str, list[str]] = {"hidden": [], "broken links": [], "of other kinds": []}
    for path, is_hidden in sorted(set(found)):
        if is_hidden:
            unread["hidden"].append(path.name)
        elif not path.is_file():
            unread["broken links"].append(path.name)
        elif _kind(path) is None:
            unread["of other kinds"].append(path.name)
        else:
            files.append(path)
    if any(unread.values()):
        groups = [
            f"{what}: {len(names)} ({', '.join(names[:3])}{', ...' * (len(names) > 3)})"
            for what, names in unread.items()
            if names
        ]
        print(f"{source}: {count(len(files), 'file')} read, others not; {'; '.join(groups)}", file=sys.stderr)
    return files


def _find_stdlib(split: str) -> list[Input]:
    """Return the standard library's own sources: no packages, tests or editor. A path's hash decides its split."""
    if split not in STDLIB_SPLITS:
        raise PreparationError(f"{STDLIB!r} has the splits {' and '.join(STDLIB_SPLITS)}, not {split!r}")
    root = Path(sysconfig.get_path("stdlib"))
    excluded = {"site-packages", "dist-packages", "test", "tests", "idlelib"}
    inputs = []
    for folder, folders, files in os.walk(root):
        folders[:] = set(folders) - excluded
        for path in (Path(folder, file) for file in files if file.endswith(".py")):
            name = path.relative_to(root).as_posix()
            is_validation = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) % 20 == 0
            if is_validation != (split == "validation"):
                continue
            try:
                path.read_bytes().decode("utf-8")
            except UnicodeDecodeError:  # a few test encodings
                continue
            inputs.append(Input("txt", f"{STDLIB}/{name}", str(path), path.stat()))
    return sorted(inputs, key=lambda i: i.name)
