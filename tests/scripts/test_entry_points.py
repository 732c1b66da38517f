"""The programs as commands: bad input ends in one line that names the cause.

Whole runs by train.py are in training/test_run.py and test_parallel.py, eval.py's numbers in test_evaluation.py.
"""

import codecs
import json
import math
import re
import shutil

import jax
import numpy as np
import pytest

from heinsen.data.tokenizer import get_tokenizer
from heinsen.decoding import Sampling, generate
from heinsen.parallel import make_mesh
from heinsen.quantities import format_bytes
from heinsen.weights import load_params
from tests.runs import BATCH, LENGTH, checkpoint_steps, finish, read_log, run_config, snapshot, train_command

pytest_plugins = ["tests.run_fixtures"]
pytestmark = pytest.mark.usefixtures("compile_cache")

DEMO, PILE = (["train.py", f"--config=configs/{name}.py", "--workdir={new}"] for name in ("demo", "pile_125m"))
GENERATE, RUN = ["scripts/generate.py", "--workdir={run}"], "--workdir={run}"
SWEEP = ["scripts/sweep.py", *train_command("{data}", "{new}")[1:]]
PREPARE = ["scripts/prepare_data.py", "--tokenizer=bytes"]

# name -> (arguments, how the line after "error: " begins; ... is anything). {run} is a whole run on {data}, {none}
# an empty folder, {bare} a run without a checkpoint, {export} a folder of weights, {text} a file; {new} does not exist.
BAD_COMMANDS = {
    "train: mistyped field": (
        [*DEMO, "--config.optimizer.learning_rat=1"],
        "--config.optimizer.learning_rat: the config has no such field; is it optimizer.learning_rate or",
    ),
    "train: warm-up longer than the run": (
        [*PILE, "--config.total_tokens=1000000"],
        "...optimizer.warmup_steps = 2000 does not fit a run of 3 steps",
    ),
    "train: missing data": (
        [*DEMO, "--config.data.path={none}"],
        "no token dataset at {none}/train...scripts/prepare_data.py...give --config.model.vocab_size",
    ),
    "eval: no run": (["eval.py", "--workdir={none}"], "{none} is not a run folder"),
    "eval: missing split": (
        ["eval.py", RUN, "--split=test"],
        "no token dataset at.../test (...has train, validation)",
    ),
    "eval: a plot of another kind": (
        ["eval.py", RUN, "--by_position={new}/plot.txt"],
        "--by_position={new}/plot.txt: expected the name of a file that ends in .png",
    ),
    "recall: more keys than ids": (
        ["scripts/recall.py", "--task=associative", "--lengths=4,500", "--out={new}"],
        "length 500 of task 'associative': it must be from 1 to 127, as model.vocab_size = 256",
    ),
    "recall: more keys than characters": (
        ["scripts/recall.py", "--task=associative", "--lengths=100", "--texts={new}"],
        "length 100 of task 'associative': it must be from 1 to 63",
    ),
    "recall: no text": (
        ["scripts/recall.py", "--task=mqar", "--lengths=2", "--texts={new}"],
        "task 'mqar': its answers are not among its tokens",
    ),
    "compare: nothing": (["scripts/compare_runs.py"], "name run folders, as in scripts/compare_runs.py runs/softmax"),
    "compare: no run": (["scripts/compare_runs.py", "{run}", "{none}"], "{none} is not a run folder"),
    "generate: no run": (["scripts/generate.py", "--workdir={none}"], "{none} is not a run folder"),
    "generate: no checkpoint": (["scripts/generate.py", "--workdir={bare}"], "{bare}...checkpoint"),
    "generate: prompt and stdin": ([*GENERATE, "--prompt=a", "--stdin"], "...--prompt and --stdin exclude each other"),
    "generate: temperature that is no number": ([*GENERATE, "--temperature=nan"], "temperature = nan"),
    "generate: samples without end": (
        [*GENERATE, "--samples=2", "--max_tokens=0"],
        "--max_tokens=0 writes without end",
    ),
    "generate: no state": ([*GENERATE, "--load_state={new}"], "{new} does not exist...--save_state"),
    "generate: nowhere to save": (
        [*GENERATE, "--save_state={new}/state"],
        "--save_state={new}/state: {new} is no folder that can be written to",
    ),
    "generate: a state after a stop": (
        [*GENERATE, "--save_state={all}/state", "--stop=x", "--max_tokens=9"],
        "--save_state saves what was read, tokens after a --stop too",
    ),
    "corpus: another folder": (
        ["scripts/build_corpus.py", "--out={run}"],
        "{run} is not empty and holds no whole corpus",
    ),
    "prepare: no file": ([*PREPARE, "--out={new}", "--split=train", "--source=missing.txt"], "...no file matches"),
    "prepare: a file in every split": (
        [*PREPARE, "--out={new}", "--split=train,validation", "--source={text}"],
        "...{text} would be in every split",
    ),
    "prepare: no source": ([*PREPARE, "--out={new}", "--split=train"], "...no source given"),
    "prepare: nothing to verify": (
        [*PREPARE, "--out={new}", "--split=train", "--verify"],
        "...no token dataset at {new}/train",
    ),
    "prepare: a file for a folder": (
        [*PREPARE, "--out={text}", "--split=train", "--source={text}"],
        "...{text}/train: Not a directory: giv",
    ),
    "export: of an export": (
        ["scripts/export.py", "--workdir={export}", "--out={new}"],
        "{export} holds exported weights already",
    ),
    "export: onto its run": (
        ["scripts/export.py", RUN, "--out={run}", "--overwrite"],
        "{run} exists and holds something",
    ),
    "experiment: no corpus": (
        ["experiments/scaling/run.py", "--corpus={none}", "--out={none}"],
        "--corpus={none} has no train-...build it with `python scripts/build_corpus.py",
    ),
    "sweep: twice": ([*SWEEP, "--sweep.seed=1", "--sweep.seed=2"], "...--sweep.seed is given twice"),
    "sweep: no value": ([*SWEEP, "--sweep.seed", "1"], "...write --sweep.seed=VALUE"),
    "sweep: an impossible end": (
        [*SWEEP, "--sweep.optimizer.b1=0.5..1.5", "--search=optuna", "--trials=2"],
        "...b1=1.5...it must lie in [0, 1)",
    ),
    "sweep: unknown launcher": (
        [*SWEEP, "--sweep.seed=1,2", "--launcher=cloud"],
        "...--launcher=cloud: choose local or slurm",
    ),
    "sweep: bad time": ([*SWEEP, "--sweep.seed=1,2", "--launcher=slurm", "--time=soon"], "...--time=soon"),
    "sweep: no config": (
        ["scripts/sweep.py", "--workdir={new}", "--sweep.seed=1"],
        "...--config=configs/NAME.py is missing",
    ),
    "sweep: status of nothing": (["scripts/sweep.py", "--workdir={new}", "--status"], "...holds no sweep"),
}
IN_NEW_PROCESSES = ("recall: more keys than ids", "corpus: another folder")  # no other quick test starts these so


@pytest.fixture(scope="module")
def folders(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("folders")
    for name in ("none", "bare", "export"):
        (folder / name).mkdir()
    shutil.copy(run.workdir / "config.json", folder / "bare")
    (folder / "export" / "config.json").write_text(json.dumps({"format": "heinsen export"}))
    (folder / "a.txt").write_text("a")
    shutil.copytree(run.workdir, folder / "run")
    names = {name: str(folder / name) for name in ("run", "none", "bare", "export", "new")}
    return names | {"text": str(folder / "a.txt"), "all": folder, "data": run.data}


@pytest.fixture(scope="module")
def bad_commands(folders, commands):
    """Run every bad command; together they must leave all folders as they were."""
    before = snapshot(folders["all"])
    ends = {}
    for name, (arguments, _) in BAD_COMMANDS.items():
        start = commands.run if name in IN_NEW_PROCESSES else commands.fork
        ends[name] = start(*(argument.format(**folders) for argument in arguments))
    assert snapshot(folders["all"]) == before
    assert sorted(path.name for path in folders["all"].iterdir()) == ["a.txt", "bare", "export", "none", "run"]
    return ends


@pytest.mark.parametrize("name", BAD_COMMANDS)
def test_bad_commands_fail_with_a_message_that_names_the_cause(bad_commands, folders, name):
    end = bad_commands[name]
    message = re.escape(BAD_COMMANDS[name][1].format(**folders)).replace(re.escape("..."), ".*")
    assert end.returncode == 1 and re.fullmatch(f"error: {message}.*\n", end.stderr), end.stderr


@pytest.mark.long
def test_a_last_update_that_breaks_the_model_is_not_reported_as_a_finished_run(run, commands, tmp_path):
    """A step's loss is that of the parameters before it, so it does not show what the last update did."""
    workdir = tmp_path / "run"
    changes = {"total_tokens": 2 * BATCH * LENGTH, "optimizer__warmup_steps": 1, "optimizer__learning_rate": 1e30}
    end = commands.run(*train_command(run.data, workdir, **changes))
    assert [entry["step"] for entry in read_log(workdir)] == [1] and math.isfinite(read_log(workdir)[0]["loss"])
    assert end.returncode == 1 and end.stdout == ""
    last = end.stderr.strip().splitlines()[-1]
    assert last.startswith("error: parameters are no longer finite at step 2") and "no checkpoint yet" in last
    assert "--config.optimizer.learning_rate" in last and "Traceback" not in end.stderr
    assert checkpoint_steps(workdir) == [], "such parameters are no checkpoint"
    assert "NaN" not in (workdir / "metrics.jsonl").read_text(), "NaN is not JSON"


# ---- generate.py -----------------------------------------------------------------------------


# generate.py once for each of the commands {name: [arguments, text on stdin]}, in one process, which loads and compiles
# for all of them. Prints what each wrote, and how many bytes all arrays had when the first began to write. Ctrl-C
# arrives after the first tokens of the commands named "interrupted ...".
GENERATE_ALL = """
import contextlib, io, json, sys
import jax
from absl import flags
from scripts import generate
write, n_bytes = generate.continue_texts, []
def count_bytes(*args, **kwargs):
    n_bytes.append(sum(x.nbytes for x in jax.live_arrays()))
    for piece in write(*args, **kwargs):
        yield piece
        if name.startswith("interrupted"):
            raise KeyboardInterrupt
generate.continue_texts = count_bytes
written = {}
for name, (arguments, text) in json.loads(sys.argv[1]).items():
    sys.stdin = io.StringIO(text)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        generate.main(generate.parse_flags(["scripts/generate.py", *arguments]))
    written[name] = out.getvalue()
    for flag in flags.FLAGS:
        flags.FLAGS[flag].unparse()  # to its default
print(json.dumps(written | {"live bytes": n_bytes[0]}))
"""


@pytest.fixture(scope="module")
def written(run, commands, tmp_path_factory):
    same = [f"--workdir={run.workdir}", "--max_tokens=40"]
    state = tmp_path_factory.mktemp("state") / "state"
    greedy = ["--prompt=some text", "--temperature=0"]
    cases = {
        "greedy": [[*same, *greedy], ""],
        "save": [[*same, "--prompt=some te", "--max_tokens=0", f"--save_state={state}"], ""],
        "stdin": [[*same, "--stdin", "--seed=3", "--top_k=20"], "some text"],
        "book": [[*same, "--stdin", "--temperature=0", f"--save_state={state}_2"], "some text"],
        "document": [[*same, "--stop_at_eot", "--max_tokens=400"], ""],
        "samples": [[*same, "--prompt=some text", "--samples=2", "--min_p=0.05", "--stop=e"], ""],
        "state": [[*same, f"--load_state={state}", "--prompt=xt", "--temperature=0"], ""],
        "interrupted samples": [[*same, *greedy, "--samples=2"], ""],
        "interrupted stream": [[same[0], *greedy, "--max_tokens=0"], ""],
    }
    before = snapshot(run.workdir)
    end = commands.run("-c", GENERATE_ALL, json.dumps(cases))
    assert snapshot(run.workdir) == before
    assert end.returncode == 0 and "Traceback" not in end.stderr, end.stderr
    written = json.loads(end.stdout)
    line = f"{state}: the state after 7 tokens, {format_bytes(state.stat().st_size)}\n"
    assert written["save"] == "" and line in end.stderr
    return written


def expected_text(run, prompt: str | None, *arguments) -> str:
    model, tokenizer = run_config(run.data).model, get_tokenizer("bytes")
    _, params = load_params(run.workdir, model, make_mesh())
    ids = np.array([tokenizer.eot_id]) if prompt is None else tokenizer.encode(prompt)
    return (prompt or "") + tokenizer.decode(list(generate(model, params, ids, *arguments))) + "\n"


def test_generate_prints_the_prompt_and_what_follows(run, written):
    assert written["greedy"] == expected_text(run, "some text", Sampling(0.0), 0, 40)
    assert len(written["greedy"]) > len("some text") + 20


def test_generate_holds_the_parameters_once(run, written):
    _, params = load_params(run.workdir, run_config(run.data).model, make_mesh())
    n_bytes = sum(x.nbytes for x in jax.tree.leaves(params))
    assert n_bytes <= written["live bytes"] < 1.2 * n_bytes


def test_generate_reads_the_prompt_from_stdin_and_draws_by_the_seed(run, written):
    assert written["stdin"] == expected_text(run, "some text", Sampling(top_k=20), 3, 40)
    assert written["stdin"] != expected_text(run, "some text", Sampling(top_k=20), 4, 40)


def test_generate_does_not_print_a_text_whose_state_it_saves(written):
    assert written["book"] == written["greedy"].removeprefix("some text")


def test_generate_without_a_prompt_writes_one_document(run, written):
    tokenizer = get_tokenizer("bytes")
    assert written["document"] == expected_text(run, None, Sampling(), 0, 400, tokenizer.eot_id)
    assert 0 < len(written["document"]) < 400 and "endoftext" not in written["document"]


def test_generate_continues_from_a_saved_state(written):
    assert written["state"] == "xt" + written["greedy"].removeprefix("some text")


def test_generate_writes_several_samples_up_to_a_stop_string(run, written):
    first = expected_text(run, "some text", Sampling(min_p=0.05), 0, 40).removesuffix("\n").removeprefix("some text")
    samples = re.fullmatch(r"---- 1 of 2\n(.*)\n---- 2 of 2\n(.*)\n", written["samples"], re.DOTALL).groups()
    assert samples[0] == "some text" + first.split("e")[0] and samples[1].startswith("some text")
    assert not any("e" in text.removeprefix("some text") for text in samples)


def test_generate_prints_what_it_has_when_it_is_interrupted(run, written):
    first = expected_text(run, "some text", Sampling(0.0), 0, 32)
    assert written["interrupted samples"] == f"---- 1 of 2\n{first}---- 2 of 2\n{first}"
    assert written["interrupted stream"] == expected_text(run, "some text", Sampling(0.0), 0, 8)


def test_generate_streams_valid_utf8_until_the_reader_leaves_and_saves_the_state(run, commands, tmp_path):
    """At a high temperature all bytes are nearly equally likely: most are not UTF-8, some are half a character."""
    where = [f"--workdir={run.workdir}", f"--save_state={tmp_path / 'state'}"]
    process = commands.start("scripts/generate.py", *where, "--max_tokens=1000000", "--temperature=100")
    decoder = codecs.getincrementaldecoder("utf-8")(errors="strict")
    pieces = [decoder.decode(process.stdout.read1()) for _ in range(200)]
    assert process.poll() is None, "it goes on"
    text = "".join(pieces)
    assert sum(map(bool, pieces)) > 100, "in pieces, as they are drawn"
    assert "\N{REPLACEMENT CHARACTER}" in text and any(letter in text for letter in "abcdefghijklm")
    process.stdout.close()
    process.stdout = None
    end = finish(process)
    assert end.returncode == 0 and "Traceback" not in end.stderr and "BrokenPipe" not in end.stderr
    assert (tmp_path / "state").exists() and "the state after" in end.stderr
