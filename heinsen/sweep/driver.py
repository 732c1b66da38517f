"""The loop that starts the runs of a sweep and watches them."""

import signal
import sys
import time

from tqdm import tqdm

from heinsen.errors import Interruption
from heinsen.quantities import count
from heinsen.sweep.folder import SweepFolder
from heinsen.sweep.launcher import Launcher
from heinsen.sweep.runs import RunView, summary
from heinsen.sweep.search import Search

_LOOK_SECONDS = 0.2
_REDRAW_SECONDS = 1.0


class SweepInterruption(Interruption):
    """Ctrl-C or SIGTERM: the runs have stopped, or remain with SLURM; the message says which."""


def drive(folder: SweepFolder, search: Search, launcher: Launcher, retry: bool = False) -> list[RunView]:
    """Start the runs that `search` proposes as `launcher` has room, and return all runs when they have ended.

    A finished run is not started again; a run that has crashed before, only with `retry`. Messages go to stderr,
    with a line of progress in a terminal. Raises SweepInterruption on Ctrl-C and SIGTERM.
    """
    terminated: list[int] = []  # an exception in the handler is lost where the garbage collector runs
    previous = signal.signal(signal.SIGTERM, lambda number, _: terminated.append(number))
    with tqdm(bar_format="{desc}", disable=None, leave=False, dynamic_ncols=True) as line:
        driver = _Driver(folder, search, launcher, retry, line)
        try:
            while driver.step():
                if terminated:
                    raise KeyboardInterrupt
        except KeyboardInterrupt as interruption:
            driver.say(launcher.stop_message)
            raise SweepInterruption(launcher.stop()) from interruption
        finally:
            signal.signal(signal.SIGTERM, previous)
            views = folder.views()
            folder.write_csv(views)
    return views


class _Driver:
    def __init__(self, folder: SweepFolder, search: Search, launcher: Launcher, retry: bool, line: tqdm):
        self._folder, self._search, self._launcher = folder, search, launcher
        self._line, self._drawn, self._knows_eta = line, 0.0, False
        self._before = {view.name: view for view in folder.views()}
        self._watched, self._pruned = set(launcher.active()), set[str]()
        if n_finished := sum(view.state == "finished" for view in self._before.values()):
            self.say(f"{n_finished} of {count(len(folder.runs), 'run')} finished earlier")
        self._crashed = {name for name, view in self._before.items() if view.state == "crashed" and not retry}
        if self._crashed:
            names = ", ".join(self._crashed)
            self.say(f"{count(len(self._crashed), 'run')} crashed earlier, left alone without --retry: {names}")

    def say(self, text: str) -> None:
        tqdm.write(text, file=sys.stderr)

    def step(self) -> bool:
        """Record the runs that have ended, start new ones, and wait a moment; return False when all have ended."""
        self._record_ended()
        proposed = self._start_proposed()
        if not self._watched and not proposed and self._search.is_done():
            return False
        if self._folder.definition.strategy.adaptive:
            self._prune()
        if time.monotonic() - self._drawn > _REDRAW_SECONDS:
            self._show_progress()
        if not proposed:
            time.sleep(_LOOK_SECONDS)
        return True

    def _show_progress(self) -> None:
        """Renew the line of progress in a terminal; in a log file say it once, when the first runs tell the ETA."""
        if not (self._line.disable and self._knows_eta):
            text, self._drawn = summary(self._folder.views()), time.monotonic()
            self._line.set_description_str(text)
            if self._line.disable and "ETA" in text:
                self.say(text)
                self._knows_eta = True

    def _record_ended(self) -> None:
        active, at_a_time = self._launcher.active(), len(self._watched)
        for run in [run for run in self._folder.runs if run.name in self._watched - active]:
            self._watched.remove(run.name)
            view = self._folder.view(run)
            self._report_end(view)
            self._search.record_end(view)
            views = self._folder.views()
            self._folder.write_csv(views)
            self.say(summary(views, at_a_time))

    def _start_proposed(self) -> bool:
        """Start what the search proposes; return whether it has proposed anything."""
        room = self._launcher.free()
        proposed = self._search.propose(room, self._watched | self._crashed) if room > 0 else []
        for run in proposed:
            if run.refused is not None:
                self.say(f"{run.name}: refused, {run.refused}")
        started = [run for run in proposed if run.refused is None]
        if started:
            self._launcher.start(started)
        for run in started:
            self._watched.add(run.name)
            resumes = run.name in self._before and self._before[run.name].step > 0
            self.say(f"{run.name}: {self._launcher.start_message}{', resumes' if resumes else ''}")
        return bool(proposed)

    def _prune(self) -> None:
        for view in map(self._folder.view, self._folder.runs):
            is_candidate = view.state == "running" and view.name in self._watched - self._pruned
            if is_candidate and self._search.should_prune(view):
                self._folder.mark_pruned(view.run)
                self._launcher.cancel(view.name)
                self._pruned.add(view.name)

    def _report_end(self, view: RunView) -> None:
        took = "" if view.seconds is None else f" in {view.seconds:.0f} s"
        if view.state == "finished":
            loss = view.validation_loss
            result = "no validation" if loss is None else f"validation loss {loss:.4f}"
            self.say(f"{view.name}: finished{took}, {result}")
        elif view.state == "pruned":
            self.say(f"{view.name}: pruned at step {view.step:,}{took}")
        else:
            cause = _describe_exit(view.returncode)
            self.say(f"{view.name}: {view.state}{took} at step {view.step:,}, {cause}; its log ends with:")
            for line in self._folder.last_lines(view.run):
                self.say(f"    {line}")


def _describe_exit(returncode: int | None) -> str:
    if returncode is None:
        return "its job is gone"
    return f"exit status {returncode}" if returncode >= 0 else f"killed by {signal.Signals(-returncode).name}"
