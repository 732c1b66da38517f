"""The package of another commit, beside this checkout's in one process."""

import importlib.util
import io
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from heinsen.errors import InputError

_ROOT = Path(__file__).resolve().parent.parent.parent
_NAME = "heinsen_old"


@contextmanager
def old_package(commit: str | None) -> Iterator[ModuleType | None]:
    """The package of a commit, with its imports of itself renamed; None: there is none. Raises InputError."""
    if commit is None:
        yield None
        return
    done = subprocess.run(["git", "archive", commit, "heinsen"], cwd=_ROOT, capture_output=True)
    if done.returncode:
        raise InputError(f"--old={commit} is no commit of this checkout: {done.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as files:
            files.extractall(folder, filter="data")
        package = Path(folder, "heinsen").rename(Path(folder, _NAME))
        for file in package.rglob("*.py"):
            file.write_text(re.sub(r"\b(from|import) heinsen\b", rf"\1 {_NAME}", file.read_text()))
        spec = importlib.util.spec_from_file_location(
            _NAME, package / "__init__.py", submodule_search_locations=[str(package)]
        )
        assert spec is not None and spec.loader is not None
        module = sys.modules[_NAME] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
