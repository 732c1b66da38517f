"""Names of machines to plan for, and what is said where their compilers are missing."""

import importlib.util
import re

import pytest

from heinsen.chips import CHIPS
from heinsen.plan.targets import TargetError, find_target


@pytest.mark.parametrize(
    "name, chip, n_devices, topology",
    [
        ("h100", "h100", 1, "1x1x1"),
        ("h200-8", "h200", 8, "1x1x8"),
        ("a100-3", "a100", 3, "1x1x3"),
        ("b200-64", "b200", 64, "1x8x8"),
        ("v5e-1", "v5e", 1, "1x1"),
        ("v6e-8", "v6e", 8, "2x4"),
        ("v5p-8", "v5p", 4, "2x2x1"),  # TensorCores, two per chip
        ("v4-32", "v4", 16, "2x2x4"),
    ],
)
def test_a_name_says_chip_and_number(name, chip, n_devices, topology):
    target = find_target(name)
    assert (target.chip, target.n_devices, target.topology) == (CHIPS[chip], n_devices, topology)
    assert target.memory == (0.75 if chip[0] in "abh" else 1) * CHIPS[chip].memory


@pytest.mark.parametrize("name", ["h300", "", "H100", "h100-", "h100-x", "8-h100", "v5-8", "h100-8-8"])
def test_an_unknown_name_is_refused_with_those_there_are(name):
    with pytest.raises(TargetError, match="there is no such machine") as caught:
        find_target(name)
    assert all(re.search(rf"\b{chip}\b", str(caught.value)) for chip in CHIPS)


@pytest.mark.parametrize("name, remedy", [("h100-0", "up to 8"), ("h100-12", "8 each"), ("v5e", "v5e-4, v5e-8")])
def test_an_impossible_number_is_refused(name, remedy):
    with pytest.raises(TargetError, match=remedy):
        find_target(name)
    with pytest.raises(TargetError, match="v5p-8, v5p-16.* TensorCores, two per chip"):
        find_target("v5p-4")


@pytest.mark.parametrize(
    "name, remedy", [("h200", r"heinsen\[plan-gpu\]' 'jax-cuda13-plugin==\d"), ("v5e-4", r"heinsen\[plan-tpu\]")]
)
def test_a_missing_compiler_is_named(name, remedy, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TargetError, match=f"{name.split('-')[0]} needs its compiler.*pip install '{remedy}"):
        find_target(name).devices()
