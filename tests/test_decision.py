"""The rule by which the finals decide."""

from __future__ import annotations

import random

import pytest

from autodispatch.decision import Finalist, decide, gain


def finalist(name: str, us: float, seed: int = 0, **more: object) -> Finalist:
    rng = random.Random(f"{name}{seed}")
    weather = random.Random(seed)
    samples = tuple(us * weather.uniform(1.0, 1.3) * (1 + abs(rng.gauss(0, 0.003))) for _ in range(30))
    return Finalist((name, "{}"), samples, **more)  # type: ignore[arg-type]


def test_a_gain_is_seen_through_drift_that_is_larger() -> None:
    slower, faster = finalist("slower", 10.3), finalist("faster", 10.0)
    found = gain(slower, faster)
    assert 0.025 < found.low <= found.median <= found.high < 0.035


def test_the_interval_holds_the_true_gain_19_times_of_20() -> None:
    hits = 0
    for seed in range(200):
        found = gain(finalist("x", 10.0, seed), finalist("y", 10.0, seed))
        hits += found.low <= 0.0 <= found.high
    assert hits >= 180


def test_what_is_under_one_percent_is_tied_and_a_fixed_rule_picks() -> None:
    a, b, c = finalist("a", 10.05), finalist("b", 10.0), finalist("c", 10.2)
    verdict = decide([c, b, a])
    assert [f.name[0] for f in verdict.ties] == ["b", "a"]
    assert verdict.pick is a
    assert "2 that cannot be told apart" in verdict.reason


@pytest.mark.parametrize(
    ("more_of_a", "more_of_b"),
    [
        ({"relative_error": 2e-3}, {"relative_error": 1e-3}),
        ({"workspace_bytes": 1024}, {"workspace_bytes": 0}),
        ({}, {"is_incumbent": True}),
        ({}, {"is_default": True}),
    ],
)
def test_among_ties_error_workspace_and_what_is_there_already_come_before_the_name(
    more_of_a: dict[str, object], more_of_b: dict[str, object]
) -> None:
    a, b = finalist("a", 10.0, **more_of_a), finalist("b", 10.03, **more_of_b)
    assert decide([a, b]).pick is b


def test_errors_that_agree_in_two_digits_are_equal() -> None:
    a, b = finalist("a", 10.0, relative_error=1.741e-3), finalist("b", 10.03, relative_error=1.739e-3)
    assert decide([a, b]).pick is a


def test_the_default_is_left_only_for_more_than_two_percent() -> None:
    default = finalist("z", 10.15, is_default=True)
    assert decide([default, finalist("a", 10.0)]).pick is default
    slow = finalist("z", 10.4, is_default=True)
    assert decide([slow, finalist("a", 10.0)]).pick.name[0] == "a"


@pytest.mark.parametrize("fastest", ["default", "other"])
def test_whoever_is_there_already_stays_whichever_of_two_equal_ones_the_clock_favours(fastest: str) -> None:
    default = finalist("z", 10.0 if fastest == "default" else 10.03, is_default=True)
    other = finalist("a", 10.03 if fastest == "default" else 10.0)
    assert decide([default, other]).pick is default


def test_an_incumbent_goes_for_more_than_two_percent_and_comes_before_the_default() -> None:
    incumbent = finalist("i", 10.4, is_incumbent=True)
    assert decide([incumbent, finalist("a", 10.0)]).pick.name[0] == "a"
    incumbent, default = finalist("i", 10.12, is_incumbent=True), finalist("d", 10.19, is_default=True)
    assert decide([default, incumbent, finalist("a", 10.0)]).pick is incumbent


def test_one_finalist_is_the_pick() -> None:
    only = finalist("a", 10.0)
    verdict = decide([only])
    assert (verdict.pick, verdict.ties, verdict.reason) == (only, (only,), "the fastest")
