"""Datasets and runs at addresses: by a file system in memory, by one of other processes (file://), and (long) by S3."""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
import uuid

import fsspec
import numpy as np
import pytest

from heinsen.contrib.remote.files import Remote
from heinsen.contrib.remote.runs import RunMirror
from heinsen.data.dataset import DatasetError, TokenDataset
from heinsen.data.mixture import open_mixture
from heinsen.files import seal
from heinsen.remote import RemoteError, local_run
from heinsen.training.folder import RunError, load_run
from heinsen.training.loop import RunInterrupted, train
from tests.runs import (
    KEEP,
    ROOT,
    STEPS,
    TIMEOUT,
    at_step,
    checkpoint_steps,
    copy_run,
    read_log,
    run_config,
    snapshot,
    stop_when,
    train_command,
    without_timing,
    write_split,
)

pytest_plugins = ["tests.run_fixtures"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "heinsen"


@pytest.fixture
def address():
    """An address in memory that no other test has."""
    return f"memory://{uuid.uuid4().hex}"


def put(folder, address):
    files = fsspec.core.url_to_fs(address)[0]
    for path in folder.rglob("*"):
        if path.is_file():
            files.pipe_file(f"{address}/{path.relative_to(folder).as_posix()}", path.read_bytes())


def change(address, name):
    """Flip a bit in the middle of a file."""
    files = fsspec.core.url_to_fs(address)[0]
    content = bytearray(files.cat_file(f"{address}/{name}"))
    content[len(content) // 2] ^= 1
    files.pipe_file(f"{address}/{name}", bytes(content))


@pytest.fixture
def downloads(monkeypatch):
    """The names of the files that are downloaded."""
    names, download = [], Remote.download
    monkeypatch.setattr(Remote, "download", lambda self, name, *rest: (names.append(name), download(self, name, *rest)))
    return names


# ---- datasets ------------------------------------------------------------------------------------


def test_a_dataset_is_copied_once_and_read_as_if_it_were_here(data, address, downloads):
    put(data, f"{address}/letters")
    for _ in range(2):
        (found, share), (other, _) = open_mixture(f"{address}/letters/:0.75,{data}:0.25", "train")
        assert share == 0.75 and found.path.parent.name == "letters"
        np.testing.assert_array_equal(found.read(0, len(found)), other.read(0, len(other)))
    assert downloads == ["shard-00000.npy"], "only the split that is asked for, and only once"
    open_mixture(f"{address}/letters", "validation")
    assert len(downloads) == 2


def test_a_dataset_that_was_prepared_anew_is_another_one(data, address, downloads):
    put(data, address)
    open_mixture(address, "train")
    metadata = json.loads((data / "train" / "metadata.json").read_text()) | {"source": {"anew": True}}
    fsspec.core.url_to_fs(address)[0].pipe_file(f"{address}/train/metadata.json", json.dumps(seal(metadata)).encode())
    ((found, _),) = open_mixture(address, "train")
    assert found.metadata["source"] == {"anew": True} and len(downloads) == 2


def test_damaged_and_missing_files_are_named_and_not_kept(data, address, cache):
    put(data, address)
    change(address, "train/shard-00000.npy")
    with pytest.raises(DatasetError, match=r"memory://.*/train/shard-00000.npy is damaged: its SHA-256"):
        open_mixture(address, "train")
    assert not [path for path in cache.rglob("*.npy")] and not [path for path in cache.rglob("metadata.json")]
    put(data, address)
    open_mixture(address, "train")
    with pytest.raises(DatasetError, match="test has no metadata.json: prepare the dataset"):
        open_mixture(address, "test")
    fsspec.core.url_to_fs(address)[0].rm_file(f"{address}/validation/shard-00000.npy")
    with pytest.raises(RemoteError, match="validation cannot be read: .*Check the address"):
        open_mixture(address, "validation")
    change(address, "validation/metadata.json")
    with pytest.raises(DatasetError, match="validation/metadata.json is damaged|cannot be"):
        open_mixture(address, "validation")


def test_the_file_of_a_tokenizer_is_copied_and_checked(address, tmp_path, cache):
    content = b"a tokenizer"
    text = np.append(np.arange(97, 107), 256)
    name = f"file:{hashlib.sha256(content).hexdigest()[:16]}:256"
    write_split(tmp_path / "data" / "train", text, tokenizer=name)
    (tmp_path / "data" / "train" / "tokenizer.json").write_bytes(content)
    put(tmp_path / "data", address)
    change(address, "train/tokenizer.json")
    with pytest.raises(DatasetError, match="train/tokenizer.json is damaged: its SHA-256"):
        open_mixture(address, "train")
    assert not [*cache.rglob("tokenizer.json")]
    put(tmp_path / "data", address)
    ((found, _),) = open_mixture(address, "train")
    assert (found.path / "tokenizer.json").read_bytes() == content


def test_an_interrupted_copy_goes_on(data, address, downloads, monkeypatch, cache):
    put(data, address)
    (data_path,) = (data / "train").glob("*.npy")
    monkeypatch.setattr(
        "heinsen.contrib.remote.datasets.Path.rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        open_mixture(address, "train")
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
    open_mixture(address, "train")
    assert downloads == [data_path.name]


def test_two_processes_copy_a_dataset_once(data, tmp_path):
    shutil.copytree(data, tmp_path / "bucket")
    program = (
        "from heinsen.contrib.remote.files import Remote; from heinsen.data.mixture import open_mixture\n"
        "download = Remote.download\n"
        "Remote.download = lambda *arguments: (print('copied'), download(*arguments))\n"
        f"print(len(open_mixture('file://{tmp_path}/bucket', 'train')[0][0]))"
    )
    both = [subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE) for _ in range(2)]
    texts = [process.communicate(timeout=TIMEOUT)[0].decode().split() for process in both]
    assert sorted(word for words in texts for word in words) == [*["2000"] * 2, "copied"]
    assert len(TokenDataset(data / "train")) == 2000


# ---- runs ----------------------------------------------------------------------------------------


@pytest.fixture
def finished(run, tmp_path):
    """A copy of a finished run, and its config."""
    workdir = copy_run(run.workdir, tmp_path / "finished")
    return workdir, load_run(workdir)


def whole_steps(address):
    names = (name for name in Remote(address).list() if name.endswith(".whole"))
    return sorted(int(name.removeprefix("checkpoints/").removesuffix(".whole")) for name in names)


def copied(address):
    return {name for name in Remote(address).list() if not name.endswith("run.lock")}


def test_a_mirror_holds_the_run(finished, address):
    workdir, config = finished
    RunMirror(address, workdir).copy()
    steps = checkpoint_steps(workdir)
    assert len(steps) == KEEP
    assert copied(address) == {name for name in snapshot(workdir) if name != "run.lock"} | {
        f"checkpoints/{step}.whole" for step in steps
    }
    shutil.rmtree(workdir / "checkpoints" / str(steps[0]))
    (workdir / "config.json").write_text((workdir / "config.json").read_text() + " ")
    RunMirror(address, workdir).copy()
    assert not any(name.startswith(f"checkpoints/{steps[0]}") for name in copied(address))
    assert Remote(address).read("config.json") == (workdir / "config.json").read_bytes()
    RunMirror(address, workdir).prepare(config.fingerprint)  # nothing to do


def test_a_run_that_is_only_at_the_mirror_is_fetched(finished, address, tmp_path):
    workdir, config = finished
    RunMirror(address, workdir).copy()
    RunMirror(address, tmp_path / "empty").prepare(config.fingerprint)
    assert checkpoint_steps(tmp_path / "empty") == [STEPS]
    found, expected = snapshot(tmp_path / "empty"), snapshot(workdir)
    assert found.items() <= expected.items()
    missing = {name.split("/")[0] for name in expected.keys() - found.keys()} - {"run.lock"}
    assert missing == {"checkpoints"} and [name for name in found if name.startswith(f"checkpoints/{STEPS}/")]


def test_a_checkpoint_that_was_not_copied_whole_is_not_used(finished, address, monkeypatch, tmp_path):
    workdir, config = finished
    steps, upload = checkpoint_steps(workdir), Remote.upload

    def fail(self, source, name):
        if name.startswith(f"checkpoints/{STEPS}/") and "params" in name:
            raise RemoteError("the network is gone")
        upload(self, source, name)

    monkeypatch.setattr(Remote, "upload", fail)
    (workdir / "checkpoints" / str(STEPS)).rename(tmp_path / "later")
    RunMirror(address, workdir).copy()
    (tmp_path / "later").rename(workdir / "checkpoints" / str(STEPS))
    warnings = []
    with pytest.raises(
        RemoteError, match="the network is gone. .*finished is whole: rerun the same command to copy it"
    ):
        with RunMirror(address, workdir, warnings.append) as mirror:
            mirror.start(STEPS)
            mirror._thread.join(TIMEOUT)
    assert [text.split(". ")[1] for text in warnings] == ["It is tried again after the next checkpoint"]
    RunMirror(address, tmp_path / "empty").prepare(config.fingerprint)
    assert checkpoint_steps(tmp_path / "empty") == [steps[-2]]


def test_mirrors_of_other_runs_are_refused(finished, address, tmp_path):
    workdir, config = finished
    RunMirror(address, workdir).copy()
    with pytest.raises(RunError, match="memory://.* holds a run with another config: give another --mirror"):
        RunMirror(address, tmp_path / "empty").prepare(run_config(config.data.path, model__n_layers=3).fingerprint)
    behind = copy_run(workdir, tmp_path / "behind", keep=lambda step: step < STEPS)
    with pytest.raises(RunError, match=f"holds step {STEPS} of this run, .*behind step {STEPS - 10}: give an empty"):
        RunMirror(address, behind).prepare(config.fingerprint)
    (tmp_path / "config.json").write_text("{")
    Remote(address).upload(tmp_path / "config.json", "config.json")
    with pytest.raises(RunError, match="memory://.* holds something else than this run"):
        RunMirror(address, tmp_path / "empty").prepare(config.fingerprint)
    assert not (tmp_path / "empty").exists()


def test_a_run_at_an_address_is_read_like_one_that_is_here(finished, address, downloads):
    workdir, config = finished
    with pytest.raises(RemoteError, match="holds no run and no export: it has no config.json"):
        local_run(address)
    RunMirror(address, workdir).copy()
    for _ in range(2):
        found = local_run(f"{address}/")
        assert load_run(found) == config and checkpoint_steps(found) == [STEPS]
    count = len(downloads)
    assert count == len(set(downloads))
    (workdir / "metrics.jsonl").write_text("")
    RunMirror(address, workdir).copy()
    assert read_log(local_run(address)) == [] and len(downloads) == 2 * count
    assert str(local_run(str(workdir))) == str(workdir)


def test_a_run_that_lost_its_disk_goes_on_from_its_mirror(run, commands, compile_cache, tmp_path):
    """Interrupted, its folder removed, and started again: the log is that of the uninterrupted run, bit for bit."""
    workdir, mirror, step = tmp_path / "a" / "run", f"file://{tmp_path}/bucket/run", 22
    with pytest.raises(RunInterrupted), pytest.MonkeyPatch.context() as patch:
        at_step(patch, step - 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
        train(run_config(run.data), workdir, mirror)
    assert checkpoint_steps(workdir)[-1] == checkpoint_steps(tmp_path / "bucket" / "run")[-1] == step
    shutil.rmtree(workdir)
    resumed = commands.fork(*train_command(run.data, workdir), f"--mirror={mirror}")
    assert resumed.returncode == 0, resumed.stderr
    assert f"holds no run: fetching step {step}" in resumed.stderr and f"resuming after step {step}" in resumed.stderr
    assert without_timing(read_log(workdir)) == without_timing(run.log)
    assert whole_steps(mirror) == checkpoint_steps(workdir)
    for name in ("metrics.jsonl", "config.json", "plots/loss.png"):
        assert (tmp_path / "bucket" / "run" / name).read_bytes() == (workdir / name).read_bytes()
    evaluated = commands.fork("eval.py", f"--workdir={mirror}")
    assert evaluated.returncode == 0 and json.loads(evaluated.stdout.splitlines()[-1])["step"] == STEPS


BAD_COMMANDS = {
    "workdir": (
        ["--workdir=s3://bucket/run"],
        "error: --workdir=s3://bucket/run is an address, .*give one, and --mirror",
    ),
    "mirror": (
        ["--workdir={new}", "--mirror={new}"],
        "error: --mirror=.*: expected an address such as s3://bucket/name",
    ),
    "protocol": (["--workdir={new}", "--mirror=zz://x"], "error: zz://x cannot be opened: Protocol not known: zz"),
}


def test_bad_commands_fail_in_one_line_and_write_nothing(run, commands, tmp_path):
    new = tmp_path / "new"
    _, config, _, *rest = train_command(run.data, new)
    ends = commands.fork_all(
        {
            name: {"arguments": ["train.py", config, *rest, *(word.format(new=new) for word in words)]}
            for name, (words, _) in BAD_COMMANDS.items()
        }
    )
    for name, end in ends.items():
        assert end.returncode == 1 and re.search(BAD_COMMANDS[name][1], end.stderr), end.stderr
        assert end.stderr.count("\n") == 1, end.stderr
    assert not new.exists()


@pytest.mark.skipif(importlib.util.find_spec("s3fs") is not None, reason="s3fs is installed")
def test_the_package_of_a_protocol_is_named():
    with pytest.raises(RemoteError, match="s3://bucket/x cannot be opened: Install s3fs to access S3, with pip"):
        Remote("s3://bucket/x")


# ---- by S3 ---------------------------------------------------------------------------------------


@pytest.fixture
def s3(monkeypatch):
    """A local S3 server with the bucket `bucket`."""
    pytest.importorskip("s3fs", reason="make remote installs s3fs and moto")
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/bucket", method="PUT"))
    yield "s3://bucket"
    server.stop()


@pytest.mark.long
def test_data_run_and_resumption_by_s3(s3, run, commands, tmp_path):
    put(run.data, f"{s3}/data/letters")
    workdir, mirror = tmp_path / "run", f"{s3}/runs/small"
    command = [*train_command(f"{s3}/data/letters", workdir), f"--mirror={mirror}"]
    stopped = stop_when(
        commands.start(*command), lambda: any(e["step"] >= 22 for e in read_log(workdir)), signal.SIGTERM
    )
    assert stopped.returncode == 75, stopped.stderr
    shutil.rmtree(workdir)
    resumed = commands.run(*command)
    assert resumed.returncode == 0 and "resuming after step" in resumed.stderr, resumed.stderr
    assert without_timing(read_log(workdir)) == without_timing(run.log)
    assert whole_steps(mirror) == checkpoint_steps(workdir)
    evaluated = commands.run("eval.py", f"--workdir={mirror}")
    assert evaluated.returncode == 0 and json.loads(evaluated.stdout.splitlines()[-1])["step"] == STEPS


@pytest.mark.long
def test_s3_errors_are_one_line(s3, run, commands, tmp_path, monkeypatch):
    for mirror, data, message in (
        ("s3://nowhere/run", run.data, "s3://nowhere/run cannot be written"),
        (f"{s3}/run", "s3://nowhere/data", "s3://nowhere/data/train has no metadata.json"),
    ):
        end = commands.run(
            *train_command(data, tmp_path / "run", total_tokens=5 * 64, optimizer__warmup_steps=1), f"--mirror={mirror}"
        )
        assert end.returncode == 1 and message in end.stderr.splitlines()[-1], end.stderr
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    end = commands.run("eval.py", f"--workdir={s3}/run")
    assert end.returncode == 1 and "cannot be read: Unable to locate credentials" in end.stderr, end.stderr
