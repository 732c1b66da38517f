"""Fresh random numbers in every run; a failing test says which `--seed` brings its numbers back."""

import functools
import gc
import importlib.metadata
import os
import secrets
import signal
import zlib

import jaxtyping
import numpy as np
import pytest

import tests.typechecking

# Compiling takes most of the tests' time, and most of that are LLVM's optimizations and XLA's emitters of fused loops:
# `user_jit` of tests/ops/common.py is for tests of what they make. The tests keep every core busy as it is: compile
# each program in one piece, which takes a fifth less of a core's time. The commands that tests start inherit this.
XLA_FLAGS = "--xla_cpu_parallel_codegen_split_count=1 --xla_backend_optimization_level=0"
if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones abort: they have nothing else than emitters
    XLA_FLAGS += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {XLA_FLAGS}".strip()

# All annotations of heinsen, array shapes included, are checked at run time. Install this before any import of heinsen.
jaxtyping.install_import_hook(tests.typechecking.checked_modules(), "tests.typechecking.check")

SEED_VARIABLE = "HEINSEN_TEST_SEED"
DREW_NUMBERS = pytest.StashKey[bool]()


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, help=f"of the random numbers (default: ${SEED_VARIABLE}, or fresh)")


def pytest_configure(config):
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:  # a shell's background job, nohup; runs would keep it so
            signal.signal(number, usual)
    if config.option.seed is None:
        config.option.seed = int(os.environ.get(SEED_VARIABLE, secrets.randbits(32)))


def pytest_collection_finish(session):
    """Look for cyclic garbage seldom: JAX's tracing makes so many objects that this took a tenth of the time.

    And lower all programs in one MLIR context: to make one for each takes much of the time of small programs.
    """
    from jax._src.interpreters import mlir  # once the tests are collected, JAX has been imported

    gc.freeze()
    gc.set_threshold(50_000)
    mlir.make_ir_context = functools.cache(mlir.make_ir_context)


def pytest_runtest_teardown(item, nextitem):
    """Look for it only in what the tests of one file made: compiled programs stay, and are millions of objects."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_report_header(config):
    return f"random numbers: --seed={config.option.seed}"


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Numbers drawn for this test alone, from the run's seed and the test's name."""
    request.node.stash[DREW_NUMBERS] = True
    return np.random.default_rng([request.config.option.seed, zlib.crc32(request.node.nodeid.encode())])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed and DREW_NUMBERS in item.stash:
        repeat = f"repeat with --seed={item.config.option.seed} '{item.nodeid}'"
        report.sections.append(("random numbers", repeat))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Turn the run-time checks of types off in tests of wrong types, so that the function's own error is seen."""
    unchecked = item.get_closest_marker("wrong_types") is not None
    jaxtyping.config.update("jaxtyping_disable", unchecked)
    try:
        return (yield)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
