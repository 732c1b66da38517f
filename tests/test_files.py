"""Files and folders are whole or as they were, whatever ends a write."""

import errno
import json
from pathlib import Path

import pytest

from heinsen.files import (
    atomic_folder,
    atomic_writer,
    make_folder,
    name_errors,
    seal,
    unseal,
    write_atomically,
)


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_an_error_without_a_name_gets_the_files(tmp_path):
    """As that of a full disk."""
    full = OSError(errno.ENOSPC, "No space left on device")
    path = tmp_path / "a"
    for write in (lambda: atomic_writer(path), lambda: atomic_folder(path, []), lambda: name_errors(path)):
        full.filename = None
        with pytest.raises(OSError, match=f"No space left on device: '{path}'"), write():
            raise full
    with pytest.raises(FileNotFoundError, match="'other'"), name_errors(path):
        open("other").close()
    with pytest.raises(NotADirectoryError, match=f"'{path}/b/c"):
        path.write_text("")
        make_folder(path / "b" / "c")


def test_a_sealed_record_is_checked():
    record = {"b": [1, 2.5, None, "é\ud800"], "a": {"y": float("inf"), "x": -0.0}}
    sealed = json.loads(json.dumps(seal(record)))
    assert list(sealed) == ["b", "a", "digest"] and unseal(sealed) == record and seal(sealed) == sealed
    assert unseal(dict(reversed(sealed.items()))) == record, "the order of fields does not matter"
    for change in ({"b": []}, {"c": 1}, {"digest": "0"}, {"digest": None}, {"a": {"y": float("inf"), "x": 0.0}}):
        with pytest.raises(ValueError, match="digest does not fit"):
            unseal(sealed | change)
    with pytest.raises(ValueError, match="it has no digest"):
        unseal(record)
    with pytest.raises(ValueError, match="list in place of a record"):
        unseal([record])


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, "old ü")
    assert path.read_text() == "old ü"
    with pytest.raises(ZeroDivisionError), atomic_writer(path) as file:
        file.write(b"new")
        file.flush()
        assert contents(tmp_path) == {"file": "old ü", "file.tmp": "new"}
        raise ZeroDivisionError
    assert contents(tmp_path) == {"file": "old ü"}
    write_atomically(path, "new")
    assert contents(tmp_path) == {"file": "new"}


def write_folder(folder: Path, text: str, fails: bool = False) -> None:
    with atomic_folder(folder, ("a", "b")) as temporary:
        for name in ("a", "b"):
            (temporary / name).write_text(text)
        if fails:
            raise ZeroDivisionError


@pytest.mark.parametrize("before", [None, {}, {"a": "old", "mine": "notes"}], ids=["new", "empty", "existing"])
def test_a_folder_appears_whole_and_keeps_other_files(tmp_path, before):
    folder = tmp_path / "made" / "folder"
    if before is not None:
        folder.mkdir(parents=True)
        for name, text in before.items():
            (folder / name).write_text(text)
    with pytest.raises(ZeroDivisionError):
        write_folder(folder, "new", fails=True)
    assert contents(tmp_path / "made") == {f"folder/{name}": text for name, text in (before or {}).items()}
    assert folder.exists() == (before is not None)
    write_folder(folder, "new")
    assert contents(folder) == (before or {}) | {"a": "new", "b": "new"}
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["folder"], "no temporary folder is left"


def test_a_missing_file_of_a_folder_is_an_error_and_changes_nothing(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_folder(tmp_path / "folder", ("a", "b")) as temporary:
        (temporary / "a").write_text("one")
    assert not list(tmp_path.iterdir())
