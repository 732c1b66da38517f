"""Entry points exit with one message and a status; which errors they explain."""

import errno
import re
import subprocess
import sys

import jax
import pytest

from heinsen.errors import Interruption, describe, exit_on_error
from heinsen.export import ExportError
from heinsen.export.folders import CONFIG_FILE, load_folder
from heinsen.training.devices import DeviceError, explain_device_errors
from heinsen.training.loop import RunInterruption


def test_an_interrupted_run_exits_with_status_75(capsys):
    assert issubclass(RunInterruption, Interruption)
    with pytest.raises(SystemExit) as end, exit_on_error():
        raise RunInterruption("saved")
    assert end.value.code == 75 and capsys.readouterr().err == "saved\n"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ExportError("the cause: the remedy"), "the cause: the remedy"),
        (OSError(errno.ENOSPC, "No space left on device", "a/b"), "a/b: No space left on device: free some space"),
        (PermissionError(errno.EACCES, "Permission denied", "a"), "a: Permission denied: change its permissions"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "a/b"), "a/b: Not a directory: give another path"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
    ],
)
def test_errors_that_a_user_can_fix_exit_with_cause_and_remedy(error, message):
    for then in ("", "Rerun"):
        with pytest.raises(SystemExit) as end, exit_on_error(on_os_error=then):
            raise error
        is_told = then and isinstance(error, OSError)
        assert end.value.code == f"error: {message}" + ". Rerun" * bool(is_told)  # on stderr, with status 1


def test_an_error_of_the_system_is_described_with_the_name_of_its_file_as_it_is(tmp_path):
    name = "donn\udcc3\udca9es"  # what Python makes of UTF-8 in LANG=C
    error = PermissionError(errno.EACCES, "Permission denied", name)
    assert name in describe(error) and name not in str(error)
    assert describe(OSError("text")) == describe(ValueError("text")) == "text"
    (tmp_path / name / CONFIG_FILE).mkdir(parents=True)
    with pytest.raises(ExportError, match=f"damaged .Is a directory: {tmp_path / name / CONFIG_FILE}."):
        load_folder(tmp_path / name)


def test_other_errors_are_not_hidden():
    for error in (ValueError("a bug"), OSError("not of the system"), KeyboardInterrupt()):
        with pytest.raises(type(error)), exit_on_error():
            raise error


def test_ctrl_c_exits_with_a_message_where_there_is_one():
    with pytest.raises(SystemExit) as end, exit_on_error("nothing was written"):
        raise KeyboardInterrupt
    assert end.value.code == "nothing was written"


DISTRIBUTED = """
import sys, threading
from types import SimpleNamespace as Fake
from heinsen.errors import HeinsenError, exit_on_error
sys.modules["jax"] = Fake(distributed=Fake(is_initialized=lambda: True))
threading.Thread(target=threading.Event().wait).start()  # would keep an ordinary exit waiting
with exit_on_error():
    raise {}
"""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("HeinsenError('lost')", "error: lost"),
        ("KeyboardInterrupt", "interrupted"),
        ("ValueError('a bug')", "ValueError: a bug"),
    ],
)
def test_one_of_several_processes_exits_at_once_with_any_error(error, message):
    """Python would wait for the others in JAX's exit handlers."""
    code = DISTRIBUTED.format(error)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    *trace, last = done.stderr.splitlines()
    assert (done.returncode, last) == (1, message)
    assert bool(trace) == error.startswith("ValueError"), "only an unexpected error has a traceback"


ABORTED = """
import ctypes, threading, time
from heinsen.errors import exit_on_abort
exit_on_abort("a process was lost")
threading.Thread(target=ctypes.CDLL(None).abort).start()  # from C, in a thread that is not Python's main one
time.sleep(60)
"""


def test_an_abort_in_c_exits_with_a_message():
    done = subprocess.run([sys.executable, "-c", ABORTED], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (1, "error: a process was lost\n")


def test_a_failed_collective_that_arrives_as_a_value_error_is_explained(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    text = "UNKNOWN: Gloo AllGather failed: Connection closed by peer"
    with pytest.raises(DeviceError, match=f"^another process of the run failed or was lost: {text}"):
        with explain_device_errors():
            raise ValueError(text)
    for other in (ValueError("a bug"), ExportError("UNKNOWN: ours")):
        with pytest.raises(type(other), match=str(other)), explain_device_errors():
            raise other
    with pytest.raises(DeviceError, match="^out of memory: Unable to allocate 3 TiB"), explain_device_errors():
        raise MemoryError("Unable to allocate 3 TiB")


@pytest.mark.parametrize(
    ("text", "n_processes", "message"),
    [
        ("RESOURCE_EXHAUSTED: 3 GiB\nmore", 1, "out of device memory: RESOURCE_EXHAUSTED: 3 GiB. Raise --config.accum"),
        ("Out of memory allocating", 2, "out of device memory: Out of memory allocating. Raise"),
        ("UNAVAILABLE: peer", 2, "another process of the run failed or was lost: UNAVAILABLE: peer. Restart all"),
        ("INTERNAL: bad\nmore", 1, "INTERNAL: bad"),
    ],
)
def test_errors_of_devices_come_with_a_remedy(monkeypatch, text, n_processes, message):
    monkeypatch.setattr(jax, "process_count", lambda: n_processes)
    with pytest.raises(DeviceError, match=f"^{re.escape(message)}"), explain_device_errors():
        raise jax.errors.JaxRuntimeError(text)
