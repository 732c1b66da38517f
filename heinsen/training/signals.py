"""Requests to stop a run: SIGTERM, SIGINT, a cluster's preemption notice."""

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils
from tqdm import tqdm


class StopSignals:
    """Turns signals into requests to stop at the end of a step, the same step in every process.

    Use as a context manager. A second SIGINT takes effect at once. A second SIGTERM does nothing: SLURM may send a job
    more than one. A message says at once that the signal has arrived, also while Python waits for the device.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._previous: dict[int, Any] = {}
        self._alone = jax.process_count() == 1

    def __enter__(self) -> "StopSignals":
        # With several processes JAX's preemption service receives SIGTERM and informs all of them.
        for number in (signal.SIGTERM, signal.SIGINT) if self._alone else (signal.SIGINT,):
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
            if number[0] in (signal.SIGINT, signal.SIGTERM):
                again = "; again to stop at once, without saving" if number[0] == signal.SIGINT else ""
                tqdm.write(f"{signal.Signals(number[0]).name}: stopping after this step{again}", file=sys.stderr)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(number, self._previous.pop(number))
        if not self._alone:
            os.kill(os.getpid(), signal.SIGTERM)
