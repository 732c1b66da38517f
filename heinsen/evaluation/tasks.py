"""Run tasks of the lm-evaluation-harness on a run's newest parameters."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from heinsen.data.tokenizer import get_tokenizer
from heinsen.errors import HeinsenError, InputError
from heinsen.evaluation.harness import Answers, as_lm
from heinsen.parallel import make_mesh
from heinsen.progress import track
from heinsen.training.config import TrainConfig
from heinsen.training.folder import load_tokenizer_name
from heinsen.weights import load_params


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """Results of tasks.

    Attributes:
      step: training steps of the parameters.
      metrics: {task: {metric: value}}, as the harness computes them.
      n_truncated: number of texts that were too long for the model's positions.
    """

    workdir: str
    step: int
    metrics: dict[str, dict[str, int | float]]
    n_truncated: int


def run_tasks(
    config: TrainConfig,
    workdir: str,
    names: Sequence[str],
    *,
    folder: str | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int = 16,
    add_bos_token: bool = True,
) -> TaskResult:
    """Run tasks on the newest parameters in `workdir`.

    Args:
      folder: of the tasks' YAML files; None: the harness's own tasks.
      num_fewshot: examples before each question; None: the task's own number.
      limit: at most so many questions of each task; None: all.
      batch_size: texts that the model reads at a time.
      add_bos_token: whether end-of-text comes before every text, as in training.

    Raises InputError, CheckpointError, MeshError, RunError.
    """
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise InputError("--tasks needs the lm-evaluation-harness: pip install 'lm-eval>=0.4.9'") from error
    try:
        # Without a folder of its own, the manager indexes all tasks of the harness, which takes many seconds.
        manager = TaskManager(include_path=folder, include_defaults=folder is None)
        if unknown := sorted(set(names) - set(manager.match_tasks(list(names)))):
            raise InputError(f"--tasks={','.join(unknown)}: {folder or 'the installed harness'} has no such task")
        run = Path(workdir)
        step, params = load_params(run, config.model, make_mesh())
        tokenizer = get_tokenizer(load_tokenizer_name(run), run)
        model = dataclasses.replace(config.model, vocab_size=tokenizer.vocab_size)  # its own may have more ids
        progress = lambda batches, label: track(batches, label, sum(map(len, batches)), len, "texts")
        answers = Answers(model, params, tokenizer, batch_size, progress, add_bos_token)
        results = lm_eval.simple_evaluate(
            model=as_lm(answers), tasks=list(names), task_manager=manager, num_fewshot=num_fewshot, limit=limit
        )["results"]
    except HeinsenError:
        raise
    except (ValueError, RuntimeError) as error:  # of the harness, or of a task that asks too much
        raise InputError(str(error)) from error
    metrics = {
        task: {name: value for name, value in values.items() if isinstance(value, (int, float))}
        for task, values in results.items()
    }
    return TaskResult(workdir, step, metrics, answers.n_truncated)
