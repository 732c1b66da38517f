"""Probes: the answers stand in the context, only they count, and scripts/recall.py trains a model on them."""

import dataclasses
import json
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen.evaluation.probes import ASCII, TASKS, Probe, Task, accuracy, answer_loss, right_answers, write_texts
from heinsen.models import abstract_params, forward
from tests.models.test_model import SMALL
from tests.runs import stop_when

pytest_plugins = ["tests.run_fixtures"]

VOCAB = 30
MODEL = dataclasses.replace(
    SMALL, n_layers=1, attention="softmax", position="none", implementation=None, d_key=8, d_value=8
)


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


@pytest.mark.parametrize("name", [name for name in TASKS if name != "mqar"])
@pytest.mark.parametrize("length", [1, 2, 9, 14])
def test_answers_stand_in_the_context(rng, name, length):
    task, batch = Task(name, VOCAB), 20
    tokens, indices, targets, answers = task.draw(rng, batch, length)
    assert tokens.dtype == np.int32 and tokens.min() == 0 and tokens.max() < VOCAB
    assert indices.shape == targets.shape == (batch, len(answers))
    assert indices.max() == tokens.shape[1] - 1
    for row, at, own in zip(tokens, indices, targets, strict=True):
        assert own.tolist() == recalled(name, [*row.tolist(), own[-1]])
        assert row[at[1:]][np.diff(at) == 1].tolist() == own[:-1][np.diff(at) == 1].tolist(), "answers are tokens"
    expected = {"associative": length, "phonebook": min(length, 8), "copy": 1}[name]
    assert sorted(set(answers.tolist())) == list(range(expected)) and (np.diff(answers) >= 0).all()
    assert len(np.unique(tokens[:, 1:], axis=0)) > batch / 2 or length == 1
    check_draws_repeat(task, batch, length)


def check_draws_repeat(task, batch, length):
    draw = lambda seed: task.draw(np.random.default_rng(seed), batch, length)
    jax.tree.map(np.testing.assert_array_equal, draw(3), draw(3))
    assert not np.array_equal(draw([3, 0, length]).tokens, draw([3, 1, length]).tokens), "training and test"


@pytest.mark.parametrize("length", [1, 2, 9, 14])
def test_mqar_answers_every_key_by_its_value(rng, length):
    """Every token is read one by one: pairs first, then fillers, and every key once more, where its value is due."""
    task, batch = Task("mqar", VOCAB), 20
    tokens, indices, targets, answers = task.draw(rng, batch, length)
    assert tokens.shape == (batch, 16 * length) and tokens.dtype == indices.dtype == targets.dtype == np.int32
    assert answers.tolist() == list(range(length))
    for row, at, own in zip(tokens.tolist(), indices.tolist(), targets.tolist(), strict=True):
        book, due = {}, {}
        for key, value in zip(row[0 : 2 * length : 2], row[1 : 2 * length : 2], strict=True):
            assert 0 < key < value < VOCAB and key not in book and value not in book.values()
            book[key] = value
        assert max(book) < min(book.values()), "no id is both"
        for place, token in enumerate(row[2 * length :], 2 * length):
            if token != 0:
                due[place] = book[token]
        assert dict(zip(at, own, strict=True)) == due and sorted(due.values()) == sorted(book.values())
    check_draws_repeat(task, batch, length)


def test_mqar_asks_soon_by_a_power_law(rng):
    """The first key's distance has p(d) ~ d^-0.99, d = 1 to 7 n pairs of tokens after the context."""
    length, batch = 3, 3000
    indices = Task("mqar", VOCAB).draw(rng, batch, length).indices
    distances = (indices[:, 0] - 2 * length) // 2 + 1
    assert (indices % 2 == 0).all()
    p = np.arange(1, 7 * length + 1) ** -0.99
    counts = np.bincount(distances, minlength=len(p) + 1)[1:]
    expected = batch * p / p.sum()
    assert len(counts) == len(p)
    np.testing.assert_array_less(np.abs(counts - expected), 6 * np.sqrt(expected))


def test_a_guess_among_the_possible_answers_is_right_by_chance(rng):
    for name in TASKS:
        task = Task(name, VOCAB)
        values, counts = np.unique(task.draw(rng, 2000, 5).targets, return_counts=True)
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
    probe = Probe(np.zeros((2, 6), np.int32), *np.zeros((2, 2, 4), np.int32), np.array([0, 0, 1, 1]))
    right = np.array([[True, True, True, False], [False, False, True, True]])
    assert accuracy(probe, right) == (5 / 8, 2 / 4, 4)


def test_only_answers_count(rng):
    """Loss, gradient and right answers are those of the logits of all tokens, where only the answers weigh anything."""
    params = jax.tree.map(lambda x: rng.normal(0, 0.5, x.shape).astype(np.float32), abstract_params(MODEL))
    tokens, indices, targets, _ = Task("mqar", MODEL.vocab_size).draw(rng, 2, 2)
    batch, rows = {"tokens": tokens, "indices": indices, "targets": targets}, np.arange(2)[:, None]
    is_answer, target_of = np.zeros(tokens.shape, bool), np.zeros_like(tokens)
    is_answer[rows, indices], target_of[rows, indices] = True, targets

    def masked(params):
        logits = forward(MODEL, params, tokens)[0]
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), target_of[..., None], axis=-1)[..., 0]
        return jnp.sum(jnp.where(is_answer, losses, 0.0)) / targets.size, logits

    (_, logits), want_grads = jax.jit(jax.value_and_grad(masked, has_aux=True))(params)
    log_p = np.float64(logits) - np.logaddexp.reduce(np.float64(logits), axis=-1, keepdims=True)
    loss, grads = jax.jit(jax.value_and_grad(lambda params: answer_loss(MODEL, params, batch)))(params)
    assert loss == pytest.approx(-np.mean(log_p[rows, indices, targets]), rel=1e-5)
    for got, want in zip(*map(jax.tree.leaves, (grads, want_grads)), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())

    likeliest = np.argmax(log_p[rows, indices, : MODEL.vocab_size], axis=-1)
    mixed = np.where(rng.random(targets.shape) < 0.5, likeliest, targets)
    right = jax.jit(lambda params, batch: right_answers(MODEL, params, batch))
    np.testing.assert_array_equal(right(params, batch | {"targets": mixed}), likeliest == mixed)


@pytest.mark.parametrize("task", ["associative", "copy"])
def test_texts_are_whole_sequences_in_ascii(task, tmp_path):
    write_texts(Task(task, ASCII), [2, 3], 4, 7, tmp_path / "new" / "texts.jsonl")
    lines = (tmp_path / "new" / "texts.jsonl").read_text().split("\n")[:-1]
    rows = [json.loads(line)["text"].encode("ascii") for line in lines]
    width = {"associative": 2, "copy": 1}[task]
    assert [len(row) for row in rows] == [2 + 2 * width * n for n in (2, 3, 2, 3)] and len({*rows}) == 4
    for row in rows:
        answers = list(row[row.index(1) + 1 :])[width - 1 :: width]
        assert answers == recalled(task, list(row)), row


@pytest.mark.long
def test_runs_are_compared_by_loss_recall_and_cost(run, commands):
    end = commands.run("scripts/compare_runs.py", run.workdir, "--pairs=2,3", "--contexts=8", "--sequences=4")
    assert end.returncode == 0, end.stderr
    head, _, row = (line.strip("| ").split(" | ") for line in end.stdout.splitlines())
    assert head == ["bits per byte", "2 pairs", "3 pairs", "after 8 tokens"] and row[0] == str(run.workdir)
    assert 4 < float(row[1]) < 9 and row[2].endswith("%") and row[4].endswith(" MB")


@pytest.mark.long
def test_recall_script_trains_and_measures(commands, tmp_path):
    """With one pair in the context, a few steps are enough to answer it."""
    arguments = ["scripts/recall.py", "--task=associative", "--lengths=1", "--test_lengths=1,3", "--steps=40"]
    arguments += ["--config.model.vocab_size=10", "--config.model.padded_vocab_size=16", "--config.model.d_model=16"]
    arguments += ["--config.model.n_layers=1", "--config.model.implementation=reference", "--config.log_every=20"]
    arguments += ["--config.optimizer.warmup_steps=5", "--config.optimizer.learning_rate=3e-2"]
    end = commands.run(*arguments, f"--out={tmp_path}/new/probe")
    assert end.returncode == 0, end.stderr
    assert "probe seed 0 step 40/40" in end.stderr and "ETA" in end.stderr
    result = json.loads(end.stdout.splitlines()[-1])
    assert result == json.loads((tmp_path / "new/probe/results.json").read_text())
    assert (tmp_path / "new/probe/accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert [point["length"] for point in result["accuracy"]] == [1, 3]
    assert [point["n_answers"] for point in result["accuracy"]] == [256, 768]
    assert result["accuracy"][0]["tokens"] > 0.6 > 2 * result["chance"]
    assert f"{result['accuracy'][0]['tokens']:.1%}" in end.stdout and result["model"]["d_model"] == 16

    # Killed after a checkpoint of the second seed, and resumed.
    arguments = [*arguments, f"--out={tmp_path}/killed", "--seeds=2", "--config.checkpoint_every=30"]
    step_of = lambda folder: sorted(path.name for path in folder.glob("checkpoints/*"))
    saved = lambda: sorted(map(step_of, tmp_path.glob("killed/unfinished/*"))) == [["30"], ["40"]]
    stop_when(commands.start(*arguments), saved, signal.SIGKILL)
    (other := tmp_path / "killed/unfinished/another_config").mkdir()
    end = commands.run(*arguments)
    assert end.returncode == 0 and "seed 0 step" not in end.stderr and "seed 1 step 20/40" not in end.stderr, end.stderr
    runs = json.loads(end.stdout.splitlines()[-1])["runs"]
    assert [run["seed"] for run in runs] == [0, 1] and list(other.parent.iterdir()) == [other]
    assert runs[0]["accuracy"] == result["accuracy"] != runs[1]["accuracy"]
    assert runs[0]["loss"] == result["loss"] and runs[0]["tokens"] == result["tokens"]

    before = (tmp_path / "killed/results.json").read_bytes()
    for change in ("--config.model.d_model=24", "--seeds=1"):
        end = commands.run(*arguments, change)
        assert end.returncode == 1 and "has results of another model, task, training or seed: give" in end.stderr
        assert (tmp_path / "killed/results.json").read_bytes() == before
