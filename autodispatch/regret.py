"""What is lost where only some m are tuned: the pick for the others, raced against the best that tuning finds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from autodispatch.layers import Layers
from autodispatch.problem import Problem
from autodispatch.runner import Runner
from autodispatch.selection import Selection, select
from autodispatch.store import TuningStore
from autodispatch.tuner import Tuner
from autodispatch.variants import Candidate, Registry


class Regret(NamedTuple):
    """How much slower the pick for a problem that was not tuned is than what was tuned for it; 0.01 is 1 %, infinity a
    pick that failed."""

    selection: Selection
    best: Candidate
    pick_us: float
    best_us: float

    @property
    def share(self) -> float:
        return self.pick_us / self.best_us - 1.0


def measure(
    runner: Runner, tuned: Sequence[Problem], asked: Sequence[Problem], effort: str = "quick", rounds: int = 30
) -> Iterator[Regret]:
    """Tunes some problems into a database of its own, then yields for each other one what its pick loses.

    Raises what `Tuner.tune` raises.
    """
    registry = Registry()
    known, whole = TuningStore(), TuningStore()
    device = runner.device
    tuner = Tuner(known, runner, registry, command="autodispatch regret")
    for problem in tuned:
        tuner.tune(problem, effort=effort)
    tuner = Tuner(whole, runner, registry, command="autodispatch regret")
    for problem in asked:
        leader = whole.measurement(tuner.tune(problem, effort=effort).leader)
        assert leader is not None
        best = registry.parse(leader.variant, leader.config)
        selection = select(problem, device, registry, Layers([("tuned", known)]))
        rivals = list(dict.fromkeys((best, selection.candidate)))
        times = {r.candidate: r.timing.median for r in tuner.survey(problem, rivals, rounds) if r.timing}
        best_us = min(times.values())
        yield Regret(selection, best, times.get(selection.candidate, float("inf")), best_us)
