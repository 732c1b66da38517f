"""Probes: the answers stand in the context, only they count, and scripts/recall.py trains a model on them."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from heinsen.evaluation.probes import TASKS, Probe, Task, accuracy, answer_loss, right_answers
from heinsen.models import init_params, next_token_losses
from tests.ops.quick import quick_jit
from tests.test_model import SMALL

pytest_plugins = ["tests.run_fixtures"]

VOCAB = 30
MODEL = dataclasses.replace(SMALL, n_layers=1, implementation="scan")


def recalled(task, row):
    """The tokens of a sequence's answers, found by looking up what is asked for in its context."""
    start, *rest = row
    assert start == 0 and rest.count(1) == 1 and 0 not in rest
    context, asked = rest[: rest.index(1)], rest[rest.index(1) + 1 :]
    if task == "copy":
        return context
    given, size = {"associative": (1, 2), "phonebook": (2, 5)}[task]
    entries = [context[i : i + size] for i in range(0, len(context), size)]
    book = {tuple(entry[:given]): entry[given:] for entry in entries}
    assert len(book) == len(entries), "every key once"
    queries = [tuple(asked[i : i + given]) for i in range(0, len(asked), size)]
    assert len(set(queries)) == len(queries)
    return [token for query in queries for token in book[query]]


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("length", [1, 2, 9, 14])
def test_answers_stand_in_the_context(rng, name, length):
    task, batch = Task(name, VOCAB), 20
    tokens, answers = task.draw(rng, batch, length)
    assert tokens.dtype == np.int32 and tokens.min() == 0 and tokens.max() < VOCAB
    assert answers.shape == (batch, tokens.shape[1] - 1)
    for row, own in zip(tokens, answers, strict=True):
        assert row[1:][own > 0].tolist() == recalled(name, row.tolist())
        assert sorted(set(own[own > 0].tolist())) == list(range(1, own.max() + 1))
    expected = {"associative": length, "phonebook": min(length, 8), "copy": 1}[name]
    assert answers.max() == expected and (np.diff(answers[0][answers[0] > 0]) >= 0).all()
    assert len(np.unique(tokens[:, 1:], axis=0)) > batch / 2 or length == 1
    again = task.draw(np.random.default_rng(3), batch, length), task.draw(np.random.default_rng(3), batch, length)
    np.testing.assert_array_equal(again[0].tokens, again[1].tokens)


def test_a_guess_among_the_possible_answers_is_right_by_chance(rng):
    for name in TASKS:
        task = Task(name, VOCAB)
        tokens, answers = task.draw(rng, 2000, 5)
        values, counts = np.unique(tokens[:, 1:][answers > 0], return_counts=True)
        assert len(values) == round(1 / task.chance)
        np.testing.assert_allclose(counts / counts.sum(), task.chance, rtol=0.5)


def test_lengths_and_tasks_that_cannot_be(rng):
    with pytest.raises(ValueError, match=r"length 15 of task 'associative': .* 1 to 14, as model.vocab_size = 30"):
        Task("associative", VOCAB).draw(rng, 2, 15)
    assert Task("phonebook", VOCAB).max_length == 14**2
    with pytest.raises(ValueError, match="length 0"):
        Task("copy", VOCAB).draw(rng, 2, 0)
    with pytest.raises(ValueError, match="task 'recite': choose associative, phonebook, copy"):
        Task("recite", VOCAB)
    with pytest.raises(ValueError, match="model.vocab_size = 3: the probes need 4"):
        Task("copy", 3)


def test_accuracy_counts_answers_of_which_every_token_is_right():
    tokens = np.zeros((2, 6), np.int32)
    answers = np.array([[0, 1, 1, 2, 2], [0, 1, 1, 2, 2]])
    right = np.array([[False, True, True, True, False], [True, False, False, True, True]])
    assert accuracy(Probe(tokens, answers), right) == (5 / 8, 2 / 4, 4)


def test_only_answers_count(rng):
    params = quick_jit(init_params, static_argnums=0)(MODEL, jax.random.key(0))
    probe = Task("associative", MODEL.vocab_size).draw(rng, 3, 3)
    losses = np.float64(quick_jit(next_token_losses, static_argnums=0)(MODEL, params, probe.tokens))
    loss = quick_jit(answer_loss, static_argnums=0)(MODEL, params, probe._asdict())
    assert loss == pytest.approx(losses[probe.answers > 0].mean(), rel=1e-5)
    assert loss != pytest.approx(losses.mean(), rel=1e-3)
    right = quick_jit(right_answers, static_argnums=0)(MODEL, params, probe.tokens)
    assert right.shape == probe.answers.shape
    likely = np.exp(-losses) > 1 / 2  # then no other id can be likelier
    assert np.asarray(right)[likely].all()


@pytest.mark.long
def test_recall_script_trains_and_measures(commands, tmp_path):
    """With one pair in the context, a few steps are enough to answer it."""
    arguments = ["scripts/recall.py", "--task=associative", "--lengths=1", "--test_lengths=1,3", "--steps=40"]
    arguments += ["--config.model.vocab_size=10", "--config.model.padded_vocab_size=16", "--config.model.d_model=16"]
    arguments += ["--config.model.n_layers=1", "--config.model.implementation=scan", "--config.log_every=20"]
    arguments += ["--config.optimizer.warmup_steps=5", "--config.optimizer.learning_rate=3e-2"]
    end = commands.run(*arguments, f"--out={tmp_path}/new/probe")
    assert end.returncode == 0, end.stderr
    assert "probe step 40/40" in end.stderr and "ETA" in end.stderr
    result = json.loads(end.stdout.splitlines()[-1])
    assert result == json.loads((tmp_path / "new/probe/results.json").read_text())
    assert (tmp_path / "new/probe/accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert [point["length"] for point in result["accuracy"]] == [1, 3]
    assert [point["n_answers"] for point in result["accuracy"]] == [256, 768]
    assert result["accuracy"][0]["tokens"] > 0.6 > 2 * result["chance"]
    assert f"{result['accuracy'][0]['tokens']:.1%}" in end.stdout and result["model"]["d_model"] == 16
