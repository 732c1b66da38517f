"""Searches, which decide which run of a sweep comes next: a list of known points, or proposals by Optuna."""

import abc
import warnings
from collections.abc import Callable, Collection
from typing import Any, cast

from heinsen.sweep.folder import SweepFolder
from heinsen.sweep.runs import ENDED, RunView, SweepRun, is_finite
from heinsen.sweep.space import Point, Range, SweepError

MakeRun = Callable[[Point], SweepRun]  # a run of a proposed point, refused if the config rejects it

_STORAGE = "optuna.log"


class Search(abc.ABC):
    """Proposes runs, and learns how they end."""

    @abc.abstractmethod
    def propose(self, room: int, busy: Collection[str]) -> list[SweepRun]:
        """Return at most `room` runs to start now, none of those named in `busy`. Refused runs may be among them."""

    @abc.abstractmethod
    def is_done(self) -> bool:
        """Return whether nothing more will be proposed."""

    @abc.abstractmethod
    def record_end(self, view: RunView) -> None:
        """Take note of a run that has ended, in whatever way."""

    def should_prune(self, view: RunView) -> bool:
        """Return whether this running run is too unpromising to continue."""
        return False


def make_search(folder: SweepFolder, make_run: MakeRun) -> Search:
    """Return the search of a sweep: Optuna's for an adaptive strategy, else the list of the folder's runs."""
    return OptunaSearch(folder, make_run) if folder.definition.strategy.adaptive else ListSearch(folder)


class ListSearch(Search):
    """The runs of the folder, each once."""

    def __init__(self, folder: SweepFolder):
        self._left = [view.run for view in folder.views() if view.state not in ENDED]

    def propose(self, room: int, busy: Collection[str]) -> list[SweepRun]:
        self._left = [run for run in self._left if run.name not in busy]
        chosen, self._left = self._left[:room], self._left[room:]
        return chosen

    def is_done(self) -> bool:
        return not self._left

    def record_end(self, view: RunView) -> None:
        pass


class _NoLock:
    """In place of Optuna's lock file, which a killed sweep leaves behind: `SweepFolder.lock` keeps others away."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


class OptunaSearch(Search):
    """Trials proposed by Optuna's TPE sampler and stored in the sweep's folder.

    Runs whose validation loss is worse than the median at the same step are pruned.
    """

    def __init__(self, folder: SweepFolder, make_run: MakeRun):
        try:
            import optuna
        except ImportError as error:
            raise SweepError("--search=optuna needs Optuna: pip install 'optuna>=4', or use --search=random") from error
        self._optuna, self._folder, self._make_run = optuna, folder, make_run
        self._study = self._open_study()
        self._trials: dict[str, list[Any]] = {}  # {run: its trials that have not ended}
        self._reported: dict[int, int] = {}  # {number of a trial: last step reported}
        self._waiting: list[SweepRun] = []  # runs of trials that are not started yet, or were left by a killed sweep
        for frozen in self._study.get_trials(states=[optuna.trial.TrialState.RUNNING]):
            self._admit(optuna.trial.Trial(self._study, frozen._trial_id))

    def propose(self, room: int, busy: Collection[str]) -> list[SweepRun]:
        chosen: list[SweepRun] = []
        while len(chosen) < room and not self.is_done():
            if not self._waiting:
                self._admit(self._study.ask())
                continue  # a point that has been tried before does not wait
            run = self._waiting.pop(0)
            if run.name not in busy and all(run.name != other.name for other in chosen):
                chosen.append(run)
        return chosen

    def record_end(self, view: RunView) -> None:
        state = self._optuna.trial.TrialState
        for trial in self._trials.pop(view.name, []):
            self._report(trial, view)
            if view.result is not None:
                self._study.tell(trial, view.result)
            elif view.state == "pruned" and view.validations:
                self._study.tell(trial, state=state.PRUNED)
            elif view.state != "interrupted":  # an interrupted run continues when the sweep is resumed
                self._study.tell(trial, state=state.FAIL)

    def should_prune(self, view: RunView) -> bool:
        trials = self._trials.get(view.name, [])
        for trial in trials:
            self._report(trial, view)
        return bool(trials and view.validations and trials[0].should_prune())

    def is_done(self) -> bool:
        return not self._waiting and len(self._study.trials) >= (self._folder.definition.trials or 0)

    def _open_study(self) -> Any:
        from optuna.storages.journal import JournalFileBackend, JournalStorage

        optuna = self._optuna
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # constant_liar is marked experimental
            storage = JournalStorage(JournalFileBackend(str(self._folder.path / _STORAGE), cast(Any, _NoLock())))
            study = optuna.create_study(storage=storage, study_name="sweep", load_if_exists=True)
            # A new seed each time: the same one would propose the first trials again.
            seed = self._folder.definition.search_seed + len(study.trials)
            study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        study.pruner = optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=0)
        return study

    def _admit(self, trial: Any) -> None:
        """Add the run of a trial. If its point has been tried before, the trial ends with that result."""
        run = self._make_run(self._ask_point(trial))
        self._folder.add(run)
        self._trials.setdefault(run.name, []).append(trial)
        view = self._folder.view(run)
        if view.state in ENDED:
            self.record_end(view)
        if view.state not in ENDED or view.state == "refused":  # a refused run is proposed so that it is reported
            self._waiting.append(run)

    def _ask_point(self, trial: Any) -> Point:
        point: Point = {}
        for field, values in self._folder.definition.space.items():
            if not isinstance(values, Range):
                point[field] = values[trial.suggest_categorical(field, list(range(len(values))))]
            elif values.integer:
                point[field] = trial.suggest_int(field, values.low, values.high, log=values.log)
            else:
                point[field] = values.round(trial.suggest_float(field, values.low, values.high, log=values.log))
        return point

    def _report(self, trial: Any, view: RunView) -> None:
        for step, loss in view.validations:
            if step > self._reported.get(trial.number, -1) and is_finite(loss):
                trial.report(loss, step)
                self._reported[trial.number] = step
