"""Answers to the lm-evaluation-harness: equal to what the forward pass says directly, token by token."""

import dataclasses
import json
import math

import numpy as np
import pytest

from heinsen.data.tokenizer import get_tokenizer
from heinsen.decoding import Sampling, generate, prompts
from heinsen.evaluation import harness
from heinsen.evaluation.harness import Answers, as_lm
from tests.decoding.test_decoding import MODEL, draw_params, full_forward

pytest_plugins = ["tests.run_fixtures"]
pytestmark = pytest.mark.usefixtures("compile_cache")
LENGTH = 24  # of the texts that `direct` sees, padded


@pytest.fixture
def answers(rng):
    return Answers(MODEL, draw_params(rng, MODEL), get_tokenizer("bytes"), batch_size=2)


def direct(answers: Answers, text: str, n_last: int) -> tuple[float, bool]:
    """Log-likelihood of the last n tokens of a document that begins with `text`, and whether all were the likeliest."""
    return direct_of_ids(answers, [256, *text.encode()], n_last)


def direct_of_ids(answers: Answers, ids: list[int], n_last: int) -> tuple[float, bool]:
    tokens = np.zeros((1, answers.config.n_positions or LENGTH), np.int32)
    tokens[0, : len(ids) - 1] = ids[:-1]
    logits = np.float64(full_forward(answers.config, answers.params, tokens)[0][0])
    log_p = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    log_p -= logits.max(-1, keepdims=True)
    places = range(len(ids) - 1 - n_last, len(ids) - 1)
    best = [np.argmax(logits[i, :257]) == ids[i + 1] for i in places]
    return sum(log_p[i, ids[i + 1]] for i in places), all(best)


def test_likelihoods_are_those_of_the_forward_pass_and_contexts_are_read_once(rng, answers, monkeypatch):
    requests = [("ab", "c"), ("hello", " world"), ("ab", "def"), ("", "xy"), ("hello", "!"), ("ab", "c"), ("x ", "y z")]
    for letter in "hijklmnop":  # one that greedy decoding writes, too
        logits = full_forward(MODEL, answers.params, np.array([[256, ord(letter)] + (LENGTH - 2) * [0]], np.int32))[0]
        likeliest = chr(np.argmax(logits[0, 1, :257]))
        if likeliest.isascii() and likeliest.isprintable():
            requests.append((letter, likeliest))
            break
    read, contexts = harness.read, []
    monkeypatch.setattr(harness, "read", lambda *args: (contexts.extend(map(tuple, args[2])), read(*args))[1])
    got = answers.loglikelihood(requests)
    for (context, continuation), (log_p, greedy) in zip(requests, got, strict=True):
        # The space at the end of a context counts to the continuation.
        n = len((context + continuation).encode()) - len(context.rstrip().encode())
        expected, best = direct(answers, context + continuation, n)
        assert log_p == pytest.approx(expected, abs=1e-3) and greedy == best
    assert len(contexts) == len(set(contexts)) == len({context.rstrip() for context, _ in requests})


@pytest.mark.long
def test_whole_texts_are_scored_from_their_first_token_without_a_limit(rng, answers, monkeypatch):
    texts = ["a", "".join(map(chr, rng.integers(97, 120, 20))), "", "some text"]
    got = answers.loglikelihood_rolling(texts)
    expected = [direct(answers, text, len(text))[0] if text else 0.0 for text in texts]
    np.testing.assert_allclose(got, expected, atol=2e-3)
    monkeypatch.setattr(prompts, "PREFILL_PIECE", 8)
    np.testing.assert_allclose(answers.loglikelihood_rolling(texts), expected, atol=2e-3)


def test_generation_ends_at_the_strings_and_limits_of_the_task(rng, answers):
    write = lambda text, n: bytes(generate(MODEL, answers.params, [256, *text.encode()], Sampling(0.0), 0, n, 256))
    full, stopped = {}, ""
    # A text may end at once, with the token that ends a document: of a model drawn at random, all of them may.
    while len(full.get(stopped, "")) < 6:
        answers.params = draw_params(rng, MODEL)
        full = {text: write(text, 9).decode("utf-8", errors="replace") for text in ("one", "two", "three", "fo")}
        stopped = max(full, key=lambda text: len(full[text]))
    stop = full[stopped][len(full[stopped]) // 2 :][:2]
    requests = [(text, {"until": ["\n\n\n"], "max_gen_toks": 9}) for text in full] + [
        (stopped, {"until": stop, "max_gen_toks": 9, "do_sample": False, "temperature": 0.7}),
        ("one", {"until": [], "max_gen_toks": 4}),
    ]
    got = answers.generate_until(requests)
    assert got[:4] == list(full.values())
    assert got[4] == full[stopped][: full[stopped].index(stop)]
    assert got[5] == write("one", 4).decode("utf-8", errors="replace")
    drawn = [(stopped, {"do_sample": True, "temperature": 1.5, "top_k": 50, "max_gen_toks": 9})]
    assert answers.generate_until(drawn) != [full[stopped]]


def test_repeats_of_a_sampled_request_differ_and_batches_decide_nothing(answers):
    """pass@k and self-consistency send the same request many times."""
    requests = [("ab", {"do_sample": True, "temperature": 1.0, "max_gen_toks": 12})] * 6
    written = {}
    for size in (1, 4, 6):
        answers.batch_size, answers.n_written = size, 0
        written[size] = answers.generate_until(requests)
    assert written[1] == written[4] == written[6] and len(set(written[1])) > 3
    answers.n_written = 0
    assert [text for _ in range(6) for text in answers.generate_until(requests[:1])] == written[1]


# ---- learned positions ---------------------------------------------------------------------------

ROOM = 16


@pytest.fixture
def short_answers(rng):
    """Of a model with few learned positions."""
    config = dataclasses.replace(MODEL, position="learned", n_positions=ROOM, document_token=256, attention="softmax")
    return Answers(config, draw_params(rng, config), get_tokenizer("bytes"), batch_size=2)


def draw_text(rng, n: int) -> str:
    return "".join(map(chr, rng.integers(97, 120, n)))


@pytest.mark.long
def test_a_text_of_as_many_tokens_as_there_are_positions_is_whole(rng, short_answers):
    text = draw_text(rng, ROOM)
    expected, best = direct(short_answers, text, ROOM)
    assert short_answers.loglikelihood_rolling([text]) == [pytest.approx(expected, abs=1e-3)]
    of_end, best_of_end = direct(short_answers, text, 7)
    got = short_answers.loglikelihood([(text[:9], text[9:]), ("", text)])
    assert got == [(pytest.approx(of_end, abs=1e-3), best_of_end), (pytest.approx(expected, abs=1e-3), best)]
    assert len(short_answers.generate_until([(text[:7], {"max_gen_toks": 8})])) == 1
    assert short_answers.n_truncated == 0


def test_what_is_too_long_is_truncated_from_the_left_or_read_in_windows_and_counted(rng, short_answers):
    """Beside texts that are not too long."""
    context, end, long = draw_text(rng, 40), draw_text(rng, 5), draw_text(rng, 2 * ROOM + 5)
    ids, whole = [256, *(context + end).encode()], [256, *long.encode()]
    got = short_answers.loglikelihood([("a", "b"), (context, end), ("", long)])
    in_windows = [
        direct_of_ids(short_answers, whole[: ROOM + 1], ROOM),
        direct_of_ids(short_answers, whole[ROOM : 2 * ROOM + 1], ROOM),
    ]
    in_windows.append(direct_of_ids(short_answers, whole[-ROOM - 1 :], 5))
    of_long = sum(log_p for log_p, _ in in_windows)
    expected = [direct(short_answers, "ab", 1)[0], direct_of_ids(short_answers, ids[-ROOM - 1 :], 5)[0], of_long]
    np.testing.assert_allclose([log_p for log_p, _ in got], expected, atol=2e-3)
    assert got[2][1] == all(best for _, best in in_windows) and short_answers.n_truncated == 2
    got = short_answers.loglikelihood_rolling(["ab", long])
    np.testing.assert_allclose(got, [direct(short_answers, "ab", 2)[0], of_long], atol=2e-3)
    assert short_answers.n_truncated == 3
    greedy = Sampling(0.0)
    prompts = [[256, 97], [*context.encode()][-(ROOM - 4) :]]
    written = [bytes(generate(short_answers.config, short_answers.params, p, greedy, 0, 4, 256)) for p in prompts]
    got = short_answers.generate_until([("a", {"max_gen_toks": 4}), (context, {"max_gen_toks": 4})])
    assert got == [text.decode("utf-8", errors="replace") for text in written] and short_answers.n_truncated == 4


def test_a_task_that_asks_for_as_many_tokens_as_there_are_positions_gets_half(rng, short_answers):
    """Answers to the tasks before it are not lost."""
    config, long, written = short_answers.config, draw_text(rng, 40), [""]
    while not all(written):  # a model drawn at random may end a text at once
        params = short_answers.params = draw_params(rng, config)
        written = [
            bytes(generate(config, params, prompt, Sampling(0.0), 0, ROOM // 2, 256)).decode("utf-8", errors="replace")
            for prompt in ([256, 97], [*long.encode()][-ROOM // 2 :])
        ]
    for max_tokens in (ROOM, 5 * ROOM):
        asked = {"max_gen_toks": max_tokens}
        assert short_answers.generate_until([("a", asked), (long, asked)]) == written
    assert short_answers.n_truncated == 4
    assert len(short_answers.generate_until([("", {"max_gen_toks": ROOM - 1})])) == 1 and short_answers.n_truncated == 4


@pytest.mark.long
def test_windows_are_those_of_the_harness(rng, short_answers):
    utils = pytest.importorskip("lm_eval.utils", reason="needs lm-eval: pip install 'heinsen[harness]'")
    for n in range(1, 4 * ROOM):
        tokens = rng.integers(0, 256, n).tolist()
        wanted = utils.get_rolling_token_windows(tokens, prefix_token=256, max_seq_len=ROOM, context_len=1)
        assert short_answers._windows([256], tokens) == [*map(utils.make_disjoint_window, wanted)]


def test_without_the_token_before_a_text_contexts_are_read_as_they_are(rng, answers):
    """An empty context still needs one."""
    without = dataclasses.replace(answers, add_bos_token=False)
    ((log_p, _), (of_empty, _)) = without.loglikelihood([("hello", " world"), ("", "xy")])
    assert log_p == pytest.approx(direct_of_ids(answers, [*b"hello world"], 6)[0], abs=1e-3)
    assert abs(log_p - direct(answers, "hello world", 6)[0]) > 1e-3
    assert of_empty == pytest.approx(direct(answers, "xy", 2)[0], abs=1e-3)
    assert without.loglikelihood_rolling(["xy"]) == [pytest.approx(of_empty, abs=1e-3)]
    written = bytes(generate(MODEL, answers.params, [*b"hello"], Sampling(0.0), 0, 5, 256))
    got = without.generate_until([("hello", {"max_gen_toks": 5}), ("", {"max_gen_toks": 1})])
    assert got[0] == written.decode("utf-8", errors="replace")


def test_bad_requests_are_named(answers):
    with pytest.raises(ValueError, match="an empty continuation after 'abc'"):
        answers.loglikelihood([("abc", "")])
    with pytest.raises(ValueError, match=r"unknown generation arguments \['num_beams'\]: use until"):
        answers.generate_until([("a", {"num_beams": 4})])


@pytest.mark.long
def test_the_harness_gets_the_same_numbers_for_local_tasks(rng, answers, tmp_path):
    """Multiple choice, rolling perplexity and generation, from local YAML over local JSONL, by lm-eval itself."""
    lm_eval = pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'heinsen[harness]'")
    from lm_eval.tasks import TaskManager

    rows = [{"q": "one and", "a": [" two", " too", " x"], "right": int(i)} for i in rng.integers(0, 3, 4)]
    rows += [{"q": "abc", "a": ["d", "z", "!"], "right": 0}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = (
        "dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {0}/rows.jsonl\ntest_split: test\n"
        "output_type: {1}\nmetadata:\n  version: 1\n"
    )
    choice = (
        'task: choice\ndoc_to_text: "{{q}}"\ndoc_to_choice: "{{a}}"\ndoc_to_target: "{{right}}"\ntarget_delimiter: ""\n'
    )
    (tmp_path / "choice.yaml").write_text(
        choice + common.format(tmp_path, "multiple_choice") + "metric_list:\n  - metric: acc\n"
    )
    (tmp_path / "rolling.yaml").write_text(
        'task: rolling\ndoc_to_text: ""\ndoc_to_target: "{{q}}"\n'
        + common.format(tmp_path, "loglikelihood_rolling")
        + "metric_list:\n  - metric: bits_per_byte\n"
    )
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    result = lm_eval.simple_evaluate(
        model=as_lm(answers), tasks=["choice", "rolling"], task_manager=manager, bootstrap_iters=10
    )["results"]
    right = [
        row["right"] == int(np.argmax([direct(answers, row["q"] + a, len(a))[0] for a in row["a"]])) for row in rows
    ]
    assert result["choice"]["acc,none"] == pytest.approx(np.mean(right))
    nats = sum(direct(answers, row["q"], len(row["q"]))[0] for row in rows)
    n_bytes = sum(len(row["q"]) for row in rows)
    assert result["rolling"]["bits_per_byte,none"] == pytest.approx(-nats / n_bytes / math.log(2), rel=1e-4)


@pytest.mark.long
def test_the_harness_ends_with_texts_that_are_too_long(rng, short_answers, tmp_path):
    lm_eval = pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'heinsen[harness]'")
    from lm_eval.tasks import TaskManager

    texts = [draw_text(rng, n) for n in (5, ROOM, ROOM + 1, 5 * ROOM)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"q": text}) + "\n" for text in texts))
    (tmp_path / "rolling.yaml").write_text(
        'task: rolling\ndoc_to_text: ""\ndoc_to_target: "{{q}}"\ndataset_path: json\ndataset_kwargs:\n  data_files:\n'
        f"    test: {tmp_path}/rows.jsonl\ntest_split: test\noutput_type: loglikelihood_rolling\n"
        "metric_list:\n  - metric: bits_per_byte\nmetadata:\n  version: 1\n"
    )
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    result = lm_eval.simple_evaluate(
        model=as_lm(short_answers), tasks=["rolling"], task_manager=manager, bootstrap_iters=10
    )
    assert math.isfinite(result["results"]["rolling"]["bits_per_byte,none"])
    assert result["config"]["n_truncated"] == 2 and result["config"]["add_bos_token"]
