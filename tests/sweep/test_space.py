"""What a sweep tries: values, ranges, points, and the names of their folders."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest

from heinsen.sweep.definition import Definition, changes, find_strategy
from heinsen.sweep.space import LONGEST_NAME, Range, SweepError, folder_name, parse_space
from tests.sweep.fake import definition

KINDS = {"a.rate": float, "a.size": int, "b.name": str, "b.rate": float}


def convert(field, text):
    """As a locked config would, for the fields above."""
    if field not in KINDS:
        raise SweepError(f"--sweep.{field}: no such field")
    try:
        return KINDS[field](text)
    except ValueError as error:
        raise SweepError(f"--sweep.{field}: {text!r} is no {KINDS[field].__name__}") from error


def parse(search="grid", **texts):
    texts = {name.replace("__", "."): text for name, text in texts.items()}
    return parse_space(texts, convert, find_strategy(search).paired)


def test_lists_become_values_of_the_field_and_numbers_are_sorted():
    space = parse(a__rate="3e-4, 1e-4,1", a__size="8,2", b__name="z,a", b__rate="2")
    assert space == {"a.rate": (1e-4, 3e-4, 1.0), "a.size": (2, 8), "b.name": ("z", "a"), "b.rate": (2.0,)}
    assert all(type(value) is KINDS[field] for field, values in space.items() for value in values)
    assert parse(b__name='["x,y:0.3", "z"]')["b.name"] == ("x,y:0.3", "z")
    assert parse(b__name="a..b,c")["b.name"] == ("a..b", "c")
    assert parse(b__name="data/../x")["b.name"] == ("data/../x",)


def test_ranges_take_their_kind_from_the_field():
    assert parse(a__rate="1e-5..1e-2:log")["a.rate"] == Range(1e-5, 1e-2, True, False)
    assert parse(a__rate="0..1")["a.rate"] == Range(0.0, 1.0, False, False)
    assert parse(a__rate=".1...5")["a.rate"] == Range(0.1, 0.5, False, False)
    assert parse(a__size="1..64:log")["a.size"] == Range(1, 64, True, True)


@pytest.mark.parametrize(
    "texts, message",
    [
        (dict(a__rate=""), "empty value"),
        (dict(a__rate="1,,2"), "empty value"),
        (dict(b__name="[]"), "empty value"),
        (dict(b__name='["a"'), "not a JSON list"),
        (dict(a__rate="1,fast"), "'fast' is no float"),
        (dict(a__size="1.5"), "'1.5' is no int"),
        (dict(a__rate="0.1,1e-1"), "1e-1 is listed twice"),
        (dict(a__rate="2..1"), "from a lower to a higher"),
        (dict(a__rate="0..1:log"), "above 0"),
        (dict(a__size="1..x"), "'x' is no int"),
        (dict(a__rat="1"), "no such field"),
    ],
)
def test_bad_values_are_named(texts, message):
    with pytest.raises(SweepError, match=re.escape(message)):
        parse(**texts)


def test_numbers_drawn_from_ranges_are_spread_as_asked(rng):
    low, high = sorted(10.0 ** rng.uniform(-6, 3, 2))
    for log in (False, True):
        draws = np.array([Range(low, high, log, False).draw(rng) for _ in range(4000)])
        place = (lambda x: np.log(x)) if log else (lambda x: x)
        evenly = (np.sort(place(draws)) - place(low)) / (place(high) - place(low))
        # Kolmogorov: above 2.5 / sqrt(n) once in 100,000 tries; 5e-4 for the rounding to 4 digits.
        assert np.abs(evenly - (np.arange(4000) + 0.5) / 4000).max() < 2.5 / math.sqrt(4000) + 5e-4 * high / (
            high - low
        )
        assert draws.min() >= low and draws.max() <= high
        assert all(float(f"{x:.4g}") == x or x in (low, high) for x in draws)


def test_integer_ranges_reach_both_ends_evenly(rng):
    draws = [Range(3, 6, False, True).draw(rng) for _ in range(2000)]
    counts = np.bincount(draws, minlength=7)
    assert counts[:3].sum() == 0 and len(counts) == 7 and all(type(x) is int for x in draws)
    assert np.all(np.abs(counts[3:] - 500) < 5 * math.sqrt(500))
    assert {Range(1, 3, True, True).draw(rng) for _ in range(200)} == {1, 2, 3}


def test_folder_names_tell_the_settings():
    point = {"b.name": "heinsen", "a.rate": 3e-4, "seed": 2, "a.size": 8}
    assert folder_name(point) == "rate=0.0003__size=8__name=heinsen__seed=2"
    assert folder_name(dict(reversed(point.items()))) == folder_name(point), "the order of the flags is no matter"
    assert folder_name({"a.rate": 1e-5, "b.rate": 1.0}) == "a.rate=1e-05__b.rate=1.0"


def test_folder_names_are_safe_short_and_never_the_same(rng):
    alphabet = list("ab=_/ ,.:'\"\\\n*é-1")
    points = []
    for _ in range(300):
        texts = ["".join(rng.choice(alphabet, rng.integers(1, 120))) for _ in range(2)]
        points.append({"x.name": texts[0], "y.other": texts[1], "seed": int(rng.integers(2))})
    points += [{"x.name": "a__other=b", "seed": 0}, {"x.name": "a", "y.other": "b", "seed": 0}]
    names = [folder_name(point) for point in points]
    assert len(set(names)) == len({json.dumps(point, sort_keys=True) for point in points})
    for name in names:
        assert len(name) <= LONGEST_NAME and re.fullmatch(r"[A-Za-z0-9._=+-]+", name)


def test_a_grid_has_every_combination_once():
    points = definition(parse(a__rate="1,2,3", b__name="x,y"), seeds=(5, 6)).points()
    assert len(points) == 12 == len({folder_name(point) for point in points})
    assert {point["seed"] for point in points} == {5, 6}
    assert [point for point in points if point["a.rate"] == 2 and point["b.name"] == "y"] == [
        {"a.rate": 2.0, "b.name": "y", "seed": seed} for seed in (5, 6)
    ]
    assert definition({}, seeds=(0, 1)).points() == [{"seed": 0}, {"seed": 1}]


def test_a_zip_takes_the_values_of_all_fields_together():
    space = parse(a__rate="3,1,3", b__name="x,y,z", search="zip")
    points = definition(space, search="zip", seeds=(5, 6)).points()
    assert points == [
        {"a.rate": rate, "b.name": name, "seed": seed}
        for rate, name in ((3, "x"), (1, "y"), (3, "z"))
        for seed in (5, 6)
    ]
    assert definition({}, search="zip", seeds=(0, 1)).points() == [{"seed": 0}, {"seed": 1}]


def test_more_trials_keep_the_first_ones(rng):
    space = parse(a__rate="1e-5..1e-2:log", b__name="x,y", b__rate="1e-5..1e-2:log")  # one rate may be drawn twice
    seed = int(rng.integers(1000))
    few, many, other = (
        definition(space, search="random", trials=n, search_seed=s).points()
        for n, s in ((5, seed), (9, seed), (9, seed + 1))
    )
    assert many[:5] == few and len(many) == 9 and not any(point in many for point in other)


@pytest.mark.parametrize(
    "space, changed, message",
    [
        ({}, {}, "nothing to sweep"),
        ({"a": (1,)}, dict(search="greedy"), "--search=greedy"),
        ({"a": (1,)}, dict(trials=3), "--trials is for"),
        ({"a": (1,)}, dict(search="random"), "needs --trials"),
        ({"a": (1,)}, dict(search="random", trials=0), "needs --trials"),
        ({"a": Range(0, 1, False, False)}, {}, "--sweep.a is a range"),
        ({"a": (1, 2), "b": (3,)}, dict(search="zip"), "--sweep.a has 2, --sweep.b has 1"),
        ({"seed": (1,)}, dict(seeds=(0, 1)), "exclude each other"),
        ({"a": (1,)}, dict(seeds=(0, 1), search="optuna", trials=2), "--seeds is for"),
        ({"a": (1,)}, dict(overrides={"a": "3"}), "by --config and by --sweep"),
    ],
)
def test_impossible_sweeps_are_refused(space, changed, message):
    with pytest.raises(SweepError, match=re.escape(message)):
        definition(space, **changed)


def test_definitions_come_back_from_json_and_their_differences_are_named():
    one = definition(parse(a__rate="1e-4..1:log", b__name="x,y"), search="random", trials=4, seeds=(0, 1))
    assert Definition.from_json(json.loads(json.dumps(one.to_json()))) == one
    assert changes(one, one) == []
    assert changes(one, dataclasses.replace(one, trials=9)) == [], "more trials go on"
    (fewer,) = changes(one, dataclasses.replace(one, trials=3))
    assert "--trials: 4 in the folder, 3 in the command" in fewer
    other = dataclasses.replace(one, space=parse(b__name="x", a__size="1,2"), seeds=(0,))
    assert changes(one, other) == [
        "--sweep.a.rate: 0.0001..1.0:log in the folder, not swept in the command",
        "--sweep.a.size: not swept in the folder, 1, 2 in the command",
        "--sweep.b.name: x, y in the folder, x in the command",
        "seeds: 0, 1 in the folder, 0 in the command",
    ]


def test_corners_show_every_value_and_both_ends():
    space = {"a": Range(1, 5, False, True), "b": ("x", "y", "z")}
    points = definition(space, search="optuna", trials=1).corners()
    assert {point["a"] for point in points} == {1, 5} and {point["b"] for point in points} == {"x", "y", "z"}
