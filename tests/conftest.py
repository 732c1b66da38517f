"""Fresh random numbers in every run; a failing test says which `--seed` brings its numbers back."""

import os
import secrets
import zlib

import numpy as np
import pytest

SEED_VARIABLE = "HEINSEN_TEST_SEED"
DREW_NUMBERS = pytest.StashKey[bool]()


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, help=f"of the random numbers (default: ${SEED_VARIABLE}, or fresh)")


def pytest_configure(config):
    if config.option.seed is None:
        config.option.seed = int(os.environ.get(SEED_VARIABLE, secrets.randbits(32)))


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
