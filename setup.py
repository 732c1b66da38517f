"""What pyproject.toml cannot say: a wheel holds programs and configs, too, in heinsen/_programs (heinsen.console)."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
SCRIPTS = ("prepare_data", "generate", "export", "sweep", "sweep_runs", "plot_runs")
PROGRAMS = ("train.py", "eval.py", *(f"scripts/{name}.py" for name in SCRIPTS))


class BuildWithPrograms(build_py):
    """Copies the programs of heinsen.console, and the configs, into the built package."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / "heinsen" / "_programs"
        for path in [*map(ROOT.joinpath, PROGRAMS), *(ROOT / "configs").glob("*.py")]:
            file = target / path.relative_to(ROOT)
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, file)


setup(cmdclass={"build_py": BuildWithPrograms})
