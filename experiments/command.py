"""The flags that the experiments share."""

from collections.abc import Sequence

from absl import flags

from scripts.cli import show_help


def define_flags(
    name: str, experiment: str, reads_corpus: bool = True, has_cells: bool = True, sizes: Sequence[str] = ()
) -> None:
    """Define the flags of an experiment's run.py, whose __name__ is `name`, unless it is imported.

    has_cells: of lanes (experiments/lanes.py). sizes: of the plan's field `size`, if it has one. Call it before the
    imports that take seconds: it ends the program if --help is given.
    """
    if name != "__main__":
        return
    flags.disclaim_key_flags()  # they are those of run.py
    if reads_corpus:
        flags.DEFINE_string("corpus", "corpus", "Folder of {train-*,validation,test}.jsonl.zst.")
    flags.DEFINE_string("out", f"runs/{experiment}", "Folder of the experiment.")
    if has_cells:
        flags.DEFINE_float("minutes", None, "No cell is begun after so many minutes; default: no limit.", lower_bound=0)
        flags.DEFINE_list("cells", None, "Numbers of the cells to run, from 1, as config.py lists them; default: all.")
        flags.DEFINE_bool("plan", False, "Run nothing: print the cells, and the hours of those that OUT has.")
    if sizes:
        flags.DEFINE_enum("size", None, sizes, f"Of models and text; default: {sizes[0]}, or {sizes[-1]} with --small.")
    flags.DEFINE_bool("small", False, "Everything in minutes: a rehearsal, whose results mean nothing.")
    flags.DEFINE_bool("report", False, "Only write the report of OUT/results.json.")
    show_help(name)
