"""Which run comes next: those of a list (grid, zip, random search), or what Optuna proposes."""

import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

from heinsen.sweep.folder import ENDED, RunView, SweepFolder, SweepRun, is_number
from heinsen.sweep.space import Point, Range, SweepError

_STORAGE = "optuna.log"


class Search(Protocol):
    wants_to_watch: bool  # whether gives_up is to be asked

    def propose(self, room: int, busy: Collection[str]) -> list[SweepRun]:
        """At most `room` runs to start now, none of the names in `busy` (or refused ones, to be told of)."""

    def ended(self, view: RunView) -> None:
        """A run has ended, in whatever way."""

    def gives_up(self, view: RunView) -> bool:
        """Whether this run promises too little to go on."""

    def done(self) -> bool:
        """Whether nothing more will be proposed."""


class ListSearch:
    """The runs of the folder, each once."""

    wants_to_watch = False

    def __init__(self, folder: SweepFolder):
        self._left = [view.run for view in folder.views() if view.state not in ENDED]

    def propose(self, room: int, busy: Collection[str]) -> list[SweepRun]:
        self._left = [run for run in self._left if run.name not in busy]
        chosen, self._left = self._left[:room], self._left[room:]
        return chosen

    def ended(self, view: RunView) -> None:
        pass

    def gives_up(self, view: RunView) -> bool:
        return False

    def done(self) -> bool:
        return not self._left


class OptunaSearch:
    """Trials by Optuna's TPE, kept in the folder; runs worse than the median at a step of validation are given up.

    make_run(point) makes a run of a proposed point, refused if the config forbids it.
    """

    wants_to_watch = True

    def __init__(self, folder: SweepFolder, make_run: Callable[[Point], SweepRun]):
        try:
            import optuna
            from optuna.storages.journal import JournalFileBackend, JournalStorage
        except ImportError as error:
            raise SweepError("--search=optuna needs Optuna: pip install 'optuna>=4', or use --search=random") from error
        self._optuna, self._folder, self._make_run = optuna, folder, make_run
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        definition = folder.definition
        path = Path(folder.path) / _STORAGE
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # constant_liar is called experimental
            storage = JournalStorage(JournalFileBackend(str(path)))
            study = optuna.create_study(storage=storage, study_name="sweep", load_if_exists=True)
            # Another seed each time: the same one would propose the first trials again.
            seed = definition.search_seed + len(study.trials)
            study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        study.pruner = optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=0)
        self._study, self._trials, self._reported = study, {}, {}
        self._again: list[SweepRun] = []  # of trials that a killed sweep has left
        for frozen in study.get_trials(states=[optuna.trial.TrialState.RUNNING]):
            trial = optuna.trial.Trial(study, frozen._trial_id)
            self._take_up(trial, self._ask_values(trial))

    def propose(self, room: int, busy: Collection[str]) -> list[SweepRun]:
        chosen = []
        while self._again and len(chosen) < room:
            run = self._again.pop(0)
            if run.name not in busy:
                chosen.append(run)
        while len(chosen) < room and len(self._study.trials) < self._folder.definition.trials:
            trial = self._study.ask()
            self._take_up(trial, self._ask_values(trial))
            if not self._again:  # a point that has been tried is told at once
                continue
            run = self._again.pop(0)
            if run.name not in busy and all(run.name != other.name for other in chosen):
                chosen.append(run)
        return chosen

    def ended(self, view: RunView) -> None:
        state = self._optuna.trial.TrialState
        for trial in self._trials.pop(view.name, []):
            self._report(trial, view)
            if view.state == "finished" and is_number(view.validation_loss):
                self._study.tell(trial, view.validation_loss)
            elif view.state == "pruned" and view.validations:
                self._study.tell(trial, state=state.PRUNED)
            elif view.state != "interrupted":  # that one goes on when the command is given again
                self._study.tell(trial, state=state.FAIL)

    def gives_up(self, view: RunView) -> bool:
        trials = self._trials.get(view.name, [])
        for trial in trials:
            self._report(trial, view)
        return bool(trials) and bool(view.validations) and trials[0].should_prune()

    def done(self) -> bool:
        return not self._again and len(self._study.trials) >= self._folder.definition.trials

    def _ask_values(self, trial) -> Point:
        point: Point = {}
        for field, values in self._folder.definition.space.items():
            if not isinstance(values, Range):
                point[field] = values[trial.suggest_categorical(field, list(range(len(values))))]
            elif values.integer:
                point[field] = trial.suggest_int(field, values.low, values.high, log=values.log)
            else:
                point[field] = values.round(trial.suggest_float(field, values.low, values.high, log=values.log))
        return point

    def _take_up(self, trial, point: Point) -> None:
        """Remember a trial and what it needs: nothing more if its point has been tried before."""
        run = self._make_run(point)
        self._folder.add(run)
        self._trials.setdefault(run.name, []).append(trial)
        view = self._folder.view(run)
        if view.state == "refused":
            self.ended(view)
            self._again.append(run)
        elif view.state in ENDED:
            self.ended(view)
        else:
            self._again.append(run)

    def _report(self, trial, view: RunView) -> None:
        for step, loss in view.validations:
            if step > self._reported.get(trial.number, -1) and is_number(loss):
                trial.report(loss, step)
                self._reported[trial.number] = step
