"""`run_tasks` with a stand-in for the lm-evaluation-harness; test_harness.py uses the real one where it is."""

import math
import sys
import types

import pytest

from heinsen.errors import InputError
from heinsen.evaluation.tables import format_tasks, summarize_tasks
from heinsen.evaluation.tasks import run_tasks
from heinsen.training.folder import load_run
from tests.runs import STEPS

pytest_plugins = ["tests.run_fixtures"]
pytestmark = pytest.mark.usefixtures("compile_cache")


class TaskManager:
    def __init__(self, include_path, include_defaults):
        self.known = ["own"] if include_path else ["lambada"]
        assert include_defaults == (include_path is None)

    def match_tasks(self, names):
        return [name for name in names if name in self.known]


def simple_evaluate(model, tasks, task_manager, num_fewshot, limit):
    """Asks the model for one likelihood."""
    if limit == 13:
        raise ValueError("a task's own complaint")
    assert (tasks, num_fewshot, limit) == (["own"], 0, 5)
    ((log_p, is_greedy),) = model.loglikelihood([types.SimpleNamespace(args=("ab", "c"))])
    values = {"alias": "own", "log_p,none": log_p, "log_p_stderr,none": 0.25, "greedy,none": float(is_greedy)}
    return {"results": {"own": values}}


@pytest.fixture
def harness(monkeypatch):
    names = ("lm_eval", "lm_eval.tasks", "lm_eval.api", "lm_eval.api.model")
    modules = {name: types.ModuleType(name) for name in names}
    modules["lm_eval"].simple_evaluate = simple_evaluate
    modules["lm_eval.tasks"].TaskManager = TaskManager
    modules["lm_eval.api.model"].LM = type("LM", (), {})
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def test_tasks_are_run_and_reported(run, harness):
    result = run_tasks(load_run(run.workdir), str(run.workdir), ["own"], folder="folder", num_fewshot=0, limit=5)
    log_p = result.metrics["own"]["log_p,none"]
    assert -math.inf < log_p < 0 and "alias" not in result.metrics["own"]
    assert summarize_tasks(result) == {
        "workdir": str(run.workdir),
        "step": STEPS,
        "tasks": result.metrics,
        "n_truncated": 0,
    }
    lines = format_tasks(result)
    assert lines[0] == f"{'own':<24} {'log_p,none':<24} {log_p:.4f} +- 0.2500" and len(lines) == 2
    assert lines[1].split() == ["own", "greedy,none", f"{result.metrics['own']['greedy,none']:.4f}"]


@pytest.mark.parametrize(
    ("names", "folder", "limit", "message"),
    [
        (["own", "other"], "folder", 5, "--tasks=other: folder has no such task"),
        (["own"], None, 5, "--tasks=own: the installed harness has no such task"),
        (["own"], "folder", 13, "a task's own complaint"),
    ],
)
def test_tasks_that_cannot_be_run_are_named(run, harness, names, folder, limit, message):
    with pytest.raises(InputError, match=message):
        run_tasks(load_run(run.workdir), str(run.workdir), names, folder=folder, limit=limit)


def test_a_missing_harness_is_named(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(InputError, match="pip install 'lm-eval"):
        run_tasks(load_run(run.workdir), str(run.workdir), ["own"])
