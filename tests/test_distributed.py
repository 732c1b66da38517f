"""How the processes of a run find each other; runs of several are in test_parallel.py and faults/test_peers.py."""

import re
import time

import jax
import pytest

from heinsen.distributed import ProcessError, join_processes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("127.0.0.1:1",), "--num_processes and --process_id missing"),
        (("127.0.0.1:1", 2), "--process_id missing"),
        (("127.0.0.1:1", 2, 2), "--process_id=2 must be in"),
        (("127.0.0.1:1", 0, 0), "--num_processes=0"),
        (("127.0.0.1:1", 2, 0, True), "give no --coordinator"),
        (("127.0.0.1", 2, 0), "--coordinator=127.0.0.1: expected HOST:PORT"),
        ((":1", 2, 0), "--coordinator=:1: expected HOST:PORT"),
        (
            ("127.0.0.1:0", 2, 0),
            "--coordinator=127.0.0.1:0: expected HOST:PORT of process 0, with a port from 1 to 65535",
        ),
        (("127.0.0.1:65536", 2, 1), "--coordinator=127.0.0.1:65536: expected HOST:PORT"),
        (("127.0.0.1:²", 2, 1), "expected HOST:PORT"),
        (("127.0.0.1:1", 2, 0, None, 0), "--peer_timeout=0: expected seconds"),
        (("127.0.0.1:1", 2, 0, None, 86_401), "--peer_timeout=86401: expected seconds, from 1 to 86400"),
    ],
)
def test_a_wrong_description_of_the_processes_is_refused(arguments, message):
    with pytest.raises(ProcessError, match=re.escape(message)):
        join_processes(*arguments)


@pytest.mark.parametrize(
    ("environment", "joins", "all_gpus"),
    [
        ({}, False, False),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}, False, False),  # srun --pty bash
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, True, True),
        ({"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, True, False),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, True, True),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, True, False),
        ({"PMI_SIZE": "2"}, None, False),
    ],
)
def test_processes_that_a_cluster_has_started_find_each_other(monkeypatch, environment, joins, all_gpus):
    """jax.distributed gives each process its own GPU; a single process on a node gets all of them."""
    for name in ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    calls, updates = [], []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *arguments, **options: calls.append((arguments, options)))
    monkeypatch.setattr("heinsen.distributed.exit_on_abort", lambda message: None)
    monkeypatch.setattr(jax.config, "update", lambda name, value: updates.append((name, value)))
    if joins is None:
        with pytest.raises(ProcessError, match="an MPI that JAX does not know has started 2 processes: give --coord"):
            join_processes()
    else:
        join_processes(peer_timeout=30)
    assert calls == ([((None, None, None), {"heartbeat_timeout_seconds": 30})] if joins else [])
    assert (("jax_cuda_visible_devices", "all") in updates) == all_gpus


@pytest.mark.parametrize(
    ("arguments", "others", "message"),
    [
        (
            (None, None, None, True),
            "the other processes",
            "cannot find or reach the other processes of this run: lost. S",
        ),
        (
            ("host:1", 2, 0),
            "the other processes",
            "process 0 of 2 cannot join at host:1: lost. Are all processes started",
        ),
        (
            ("host:1", 2, 1),
            "process 0 at host:1",
            "process 1 of 2 cannot join at host:1: lost. Are all processes started",
        ),
    ],
)
def test_processes_that_do_not_come_are_waited_for_aloud(monkeypatch, capsys, arguments, others, message):
    def initialize(*_, **__):
        time.sleep(0.3)
        raise RuntimeError("lost")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    for timeout in (1, 86_400):
        join_processes("host:1", 1, 0, None, timeout)  # alone
    for patience, told in ((0.01, f"waiting for {others} to join ...\n"), (10.0, "")):
        monkeypatch.setattr("heinsen.distributed._PATIENCE", patience)
        with pytest.raises(ProcessError, match=re.escape(message)):
            join_processes(*arguments)
        assert capsys.readouterr().err == told
