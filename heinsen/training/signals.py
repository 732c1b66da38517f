"""Requests to stop a run: SIGTERM, SIGINT, SIGUSR1, SIGHUP, a cluster's preemption notice."""

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils
from tqdm import tqdm

# SIGUSR1 is what SLURM's --signal is often set to; SIGHUP tells that the terminal has been closed.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class StopSignals:
    """Turns signals into requests to stop at the end of a step, the same step in every process.

    Use as a context manager. A second SIGINT takes effect at once. A second one of the others does nothing: SLURM may
    send a job more than one. A signal that was ignored stays so: nohup ignores SIGHUP. A message says at once that the
    signal has arrived, also while Python waits for the device.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._previous: dict[int, Any] = {}
        self._alone = jax.process_count() == 1

    def __enter__(self) -> "StopSignals":
        self._terminals = [number for number in (1, 2) if os.isatty(number)]
        # With several processes JAX's preemption service receives SIGTERM and informs all of them.
        for number in _SIGNALS if self._alone else _SIGNALS[1:]:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)
        # Python runs handlers between two of its instructions, which may be minutes apart; it writes a signal's number
        # to this pipe at once.
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._previous_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._tell_signals, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._previous_wakeup)
        os.close(self._write)
        self._thread.join()
        os.close(self._read)
        for number, handler in list(self._previous.items()):
            signal.signal(number, handler)

    def stop_after(self, step: int) -> str | None:
        """Return what asks to stop after this step, or None. Call once per step, in every process."""
        if self._alone:
            return self.received
        return "a request to stop" if multihost_utils.reached_preemption_sync_point(step) else None

    def _tell_signals(self) -> None:
        while number := os.read(self._read, 1):
            if number[0] in _SIGNALS:
                self._leave_closed_terminals()
                again = "; again to stop at once, without saving" if number[0] == signal.SIGINT else ""
                tqdm.write(f"{signal.Signals(number[0]).name}: stopping after this step{again}", file=sys.stderr)

    def _leave_closed_terminals(self) -> None:
        """Write to nowhere instead: writing to a terminal that is closed is an error, which would end the run."""
        for number in self._terminals:
            if not os.isatty(number):
                with open(os.devnull, "w") as nowhere:
                    os.dup2(nowhere.fileno(), number)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        """Record the request. An exception could be lost here: where the garbage collector runs, Python ignores it."""
        self._leave_closed_terminals()
        self.received = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(number, self._previous.pop(number))
        if not self._alone:
            os.kill(os.getpid(), signal.SIGTERM)
