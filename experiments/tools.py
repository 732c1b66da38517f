"""What the experiments share: a main function, and cells that are kept."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
from absl import app, flags, logging

from experiments.reports import Results, read_results, write_report
from heinsen.errors import InputError, exit_on_error
from heinsen.files import make_folder
from heinsen.host import keep_compilations
from heinsen.sweep.launcher import usable_cores
from scripts.cli import parse_flags


def run_experiment(measure: Callable[..., Results], plan: Any, small_plan: Any, report: ModuleType) -> None:
    """Run an experiment as its flags say (experiments/command.py).

    measure: (plan, the corpus if it reads one, folder, then minutes and cells for experiments of cells) -> results;
    does what is left of the plan.
    """

    def main(argv: list[str]) -> None:
        given = flags.FLAGS
        out = Path(f"{given.out}_small" if given.small else given.out)
        options = (given.minutes, given.cells) if "cells" in given else ()
        corpus = [Path(given.corpus)] if "corpus" in given else []
        own = small_plan if given.small else plan
        if "size" in given and given.size is not None:
            own = own._replace(size=given.size)
        if "plan" in given and given.plan:
            print("\n".join(list_cells(own.cells, out)))
            return
        logging.set_verbosity(logging.WARNING)
        keep_compilations()
        measure_all = lambda: measure(own, *corpus, out, *options)
        execute(out, report, None if given.report else measure_all)

    app.run(main, flags_parser=parse_flags)


def execute(out: Path, report: ModuleType, measure: Callable[[], Results] | None) -> None:
    """Measure, or read results.json if there is nothing to measure; write and print the report.

    Ends the program with one line on errors.
    """
    with exit_on_error(on_interrupt="interrupted; rerun the same command to resume"):
        if measure is not None:
            make_folder(out)
            results: Results = {**describe_machine(), **measure()}
        elif (out / "results.json").exists():
            results = read_results(out / "results.json")
        else:
            raise InputError(f"{out} has no results.json: run the experiment without --report")
        print(write_report(out, results, report))


def cell_file(name: str, out: Path) -> Path:
    return out / "cells" / f"{name.replace(' ', '_').replace(',', '')}.json"


def done_cells(names: Iterable[str], out: Path) -> dict[str, dict[str, Any]]:
    """Return {name: what was found} of the cells that OUT/results.json or OUT/cells has."""
    results = out / "results.json"
    found = dict(read_results(results)["cells"]) if results.exists() else {}
    found |= {name: dict(read_results(file)) for name in names if (file := cell_file(name, out)).exists()}
    return {name: found[name] for name in names if name in found}


def list_cells(names: Sequence[str], out: Path) -> list[str]:
    """Return the lines of --plan."""
    hours = {name: cell["seconds"] / 3600 for name, cell in done_cells(names, out).items()}
    lines = [
        f"{i:2}  {name}: " + (f"{hours[name]:.2f} hours" if name in hours else "to do")
        for i, name in enumerate(names, 1)
    ]
    if not hours:
        return [*lines, f"{out} has no cell that tells how long one takes"]
    left = (len(names) - len(hours)) * statistics.fmean(hours.values())
    return [
        *lines,
        f"{sum(hours.values()):.1f} hours for {len(hours)} of {len(names)}; about {left:.1f} for the others",
    ]


def describe_machine() -> dict[str, str]:
    cores, kind = f"{len(usable_cores())} CPU cores", jax.devices()[0].device_kind
    machine = cores if kind == "cpu" else f"{jax.device_count()} x {kind}, {cores}"
    return {"machine": machine, "jax": jax.__version__}
