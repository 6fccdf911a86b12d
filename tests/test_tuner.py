"""One tuning, on fakes: what is tried, what is stored, and what a failure costs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from autodispatch import benchmark
from autodispatch import tuner as tuner_module
from autodispatch.benchmark import Timing
from autodispatch.device import environment
from autodispatch.errors import AutodispatchError, DeviceError, UnsupportedProblemError
from autodispatch.problem import Problem
from autodispatch.records import DecisionRecord
from autodispatch.reference import Check
from autodispatch.runner import LocalRunner, Outcome, overhanging
from autodispatch.store import TuningStore
from autodispatch.tuner import Progress, Tuner
from autodispatch.variants import Candidate, Registry
from tests.fakes import H200, FakeVariant, FakeWorkbench, like, registry_of
from tests.tuning import CPU, PROBLEM, by_variant, checked, leader, tuner


def test_the_fastest_right_candidate_wins_and_everything_measured_is_stored(store: TuningStore) -> None:
    variants = FakeVariant("fast", speeds=(10, 11)), FakeVariant("slow", "split", (29,), is_library=True)
    decision = tuner(store, *variants).tune(PROBLEM, effort="full")
    assert leader(store, decision).variant == "fast"
    assert leader(store, decision).config == '{"speed":10}'
    screened = [r for r in store.measurements() if r.stage == "screen"]
    assert {(r.variant, r.median_us, r.status) for r in screened} == {
        ("fast", 10.0, "ok"),
        ("fast", 11.0, "ok"),
        ("slow", 29.0, "ok"),
    }
    assert all(r.relative_error == 1e-4 and r.samples_us for r in screened)
    assert store.decision(CPU.key, PROBLEM) == decision
    assert store.counts()["sessions"] == 1


def test_finals_hold_the_best_few_the_best_of_each_path_and_the_library(store: TuningStore) -> None:
    variants = (
        FakeVariant("near", speeds=(100, 104, 120, 130, 131)),
        FakeVariant("other_path", "split", (140, 141)),
        FakeVariant("library", "split", (145,), is_library=True),
    )
    decision = tuner(store, *variants).tune(PROBLEM, effort="full")
    finalists = [store.measurement(i) for i in decision.finalists]
    assert [(r.variant, r.median_us) for r in finalists if r] == [
        ("near", 100.0),
        ("near", 104.0),
        ("near", 120.0),
        ("near", 130.0),
        ("other_path", 140.0),
        ("library", 145.0),
    ]


@pytest.mark.parametrize("status", ["wrong_result", "out_of_bounds"])
def test_a_wrong_candidate_never_wins_and_is_stored_with_its_reason(store: TuningStore, status: str) -> None:
    variants = FakeVariant("wrong", speeds=(1,)), FakeVariant("right", speeds=(10,))
    decision = tuner(store, *variants, checks={"wrong": Check(status, "as the test says", 0.5, 3.0)}).tune(PROBLEM)
    assert leader(store, decision).variant == "right"
    record = by_variant(store, "screen")["wrong"]
    assert (record.status, record.reason, record.median_us) == (status, "as the test says", None)
    assert record.relative_error == 0.5


def test_candidates_that_do_not_build_are_skipped_and_kept_with_the_log(store: TuningStore) -> None:
    variants = (
        FakeVariant("broken", build_error="an #error"),
        FakeVariant("good"),
        FakeVariant("worse", build_error="x"),
    )
    decision = tuner(store, *variants).tune(PROBLEM)
    assert leader(store, decision).variant == "good"
    record = by_variant(store, "screen")["broken"]
    assert record.status == "compile_failed"
    assert "an #error" in record.reason
    assert "the log" in record.reason


def test_if_all_fail_there_is_an_error_with_the_reasons_and_no_winner(store: TuningStore) -> None:
    variants = FakeVariant("one", build_error="first reason"), FakeVariant("two")
    with pytest.raises(AutodispatchError, match=r"(?s)first reason.*wrong_result second reason") as error:
        tuner(store, *variants, checks={"two": Check("wrong_result", "second reason")}).tune(PROBLEM)
    assert not isinstance(error.value, DeviceError)
    assert store.decision(CPU.key, PROBLEM) is None
    assert len(store.measurements()) == 2


def test_a_candidate_without_memory_or_that_cannot_be_launched_is_not_measured_rather_than_slow(
    store: TuningStore,
) -> None:
    variants = FakeVariant("large"), FakeVariant("refused"), FakeVariant("good")
    checks = {"large": MemoryError("out of memory"), "refused": RuntimeError("invalid configuration")}
    decision = tuner(store, *variants, checks=checks).tune(PROBLEM)
    assert leader(store, decision).variant == "good"
    found = by_variant(store, "screen")
    assert (found["large"].status, found["large"].median_us) == ("out_of_memory", None)
    assert found["refused"].status == "launch_failed"
    assert "invalid configuration" in found["refused"].reason


def test_a_candidate_that_ruins_the_device_ends_the_tuning_without_further_records(store: TuningStore) -> None:
    variants = FakeVariant("good", speeds=(1,)), FakeVariant("poison", speeds=(2,)), FakeVariant("after", speeds=(3,))
    checks = {"poison": RuntimeError("illegal address")}
    with pytest.raises(DeviceError, match=r"must survive every candidate.*poison"):
        tuner(store, *variants, checks=checks, is_healthy=False).tune(PROBLEM)
    assert {r.variant for r in store.measurements()} == {"good"}
    assert store.decision(CPU.key, PROBLEM) is None


def test_an_interruption_loses_nothing_that_was_finished(store: TuningStore) -> None:
    def interrupt() -> float:
        raise KeyboardInterrupt

    variants = [FakeVariant(f"v{i}", speeds=(i + 1,)) for i in range(5)]
    subject = tuner(store, *variants, times={"v3": interrupt})
    with pytest.raises(KeyboardInterrupt):
        subject.tune(PROBLEM)
    assert {r.variant for r in store.measurements()} == {"v0", "v1", "v2"}
    assert subject._runner.bench.log[-1] == "unload"  # type: ignore[attr-defined]


def test_a_budget_that_ends_is_over_within_a_launch(store: TuningStore, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    launches: list[float] = []

    def launch() -> float:
        nonlocal now
        launches.append(now)
        now += 0.02
        return 20_000.0

    variants = [FakeVariant(f"v{i}") for i in range(60)]
    with monkeypatch.context() as patched:
        patched.setattr(time, "monotonic", lambda: now)
        decision = tuner(store, *variants, times={v.name: launch for v in variants}).tune(PROBLEM, budget_s=2.0)
    screened = by_variant(store, "screen")
    assert 1 < len(screened) < 60
    assert not decision.complete
    assert max(launches) <= 2.0
    assert all(len(r.samples_us) >= benchmark.MIN_SAMPLES for r in screened.values())
    assert tuner(store, *variants, times={"v7": lambda: 9.0}).tune(PROBLEM).complete


def test_a_used_up_budget_decides_between_what_was_measured(store: TuningStore) -> None:
    variants = [FakeVariant(f"v{i}", speeds=(i + 1,)) for i in range(5)]
    decision = tuner(store, *variants).tune(PROBLEM, budget_s=0.0)
    assert leader(store, decision).variant == "v0"
    assert len({r.variant for r in store.measurements()}) == 1


@pytest.mark.parametrize(
    "problem", [Problem(0, 4, 4, "float32"), Problem(4, 0, 4, "float32"), Problem(4, 4, 0, "float32")]
)
def test_problems_without_work_are_refused_and_leave_no_record(store: TuningStore, problem: Problem) -> None:
    with pytest.raises(UnsupportedProblemError, match="must be positive"):
        tuner(store, FakeVariant("any")).tune(problem)
    assert sum(store.counts().values()) == 0


def test_an_error_that_every_candidate_would_meet_is_raised_before_anything_is_stored(store: TuningStore) -> None:
    subject = tuner(store, FakeVariant("any"))

    def require() -> None:
        raise DeviceError("the card is unknown")

    subject._runner.require = require  # type: ignore[method-assign]
    with pytest.raises(DeviceError):
        subject.tune(PROBLEM)
    assert sum(store.counts().values()) == 0


def test_a_second_tuning_takes_the_place_of_the_first_decision_and_keeps_its_measurements(store: TuningStore) -> None:
    def run(**times: float) -> DecisionRecord:
        fakes: dict[str, Callable[[], float]] = {n: (lambda t=t: t) for n, t in times.items()}
        return tuner(store, FakeVariant("a"), FakeVariant("b"), times=fakes).tune(PROBLEM)

    assert leader(store, run(a=10.0, b=12.0)).variant == "a"
    kept = {r.id for r in store.measurements()}
    assert leader(store, run(a=12.0, b=10.0)).variant == "b"
    found = store.decision(CPU.key, PROBLEM)
    assert found is not None
    assert leader(store, found).variant == "b"
    assert kept < {r.id for r in store.measurements()}


def test_a_clear_winner_wins_under_noise_and_outliers(store: TuningStore) -> None:
    for seed in range(10):
        rng = random.Random(seed)

        def noisy(base: float, rng: random.Random = rng) -> Callable[[], float]:
            return lambda: base * (1 + abs(rng.gauss(0, 0.03))) * (5 if rng.random() < 0.05 else 1)

        times = {"a": noisy(10.0), "b": noisy(10.02), "c": noisy(9.0)}
        decision = tuner(store, *(FakeVariant(n) for n in times), times=times).tune(PROBLEM)
        assert leader(store, decision).variant == "c"


def test_quick_keeps_the_defaults_and_the_likely_winners_of_each_path_and_full_all_that_may_win(
    store: TuningStore,
) -> None:
    many = FakeVariant("many", speeds=tuple(range(60, 19, -1)))
    other = FakeVariant("other", "split", tuple(range(100, 140)), is_library=True)
    subject = tuner(store, many, other)

    def tried(effort: str) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {"many": [], "other": []}
        for c in subject.shortlist(PROBLEM, effort):
            found[c.variant.name].append(c.config.speed)  # type: ignore[attr-defined]
        return found

    assert tried("quick") == {"many": [*range(20, 34), 60], "other": [*range(100, 114)]}
    assert tried("full") == {"many": [*range(20, 41), 60], "other": [*range(100, 114)]}


def test_the_listener_hears_every_step(store: TuningStore) -> None:
    heard: list[Progress] = []
    tuner(store, FakeVariant("a"), FakeVariant("b"), listener=heard.append).tune(PROBLEM)
    assert [(p.stage, p.done, p.total) for p in heard] == [
        ("screen", 0, 2),
        ("screen", 1, 2),
        ("screen", 1, 2),
        ("screen", 2, 2),
        ("finals", 0, 1),
        ("finals", 1, 1),
    ]
    assert heard[-1].record is not None


def test_a_survey_times_all_against_all_and_lists_failures_last(store: TuningStore) -> None:
    variants = FakeVariant("slow", speeds=(20,)), FakeVariant("fast", speeds=(10,)), FakeVariant("bad", speeds=(1,))
    results = tuner(store, *variants, checks={"bad": Check("wrong_result", "no")}).survey(PROBLEM, rounds=3)
    assert [(r.candidate.variant.name, r.check.status) for r in results] == [
        ("fast", "ok"),
        ("slow", "ok"),
        ("bad", "wrong_result"),
    ]
    assert store.decision(CPU.key, PROBLEM) is None


def test_inputs_that_do_not_fit_are_an_error_that_a_caller_expects(store: TuningStore) -> None:
    subject = tuner(store, FakeVariant("any"))

    def load(problem: Problem, copies: int | None = None) -> None:
        raise MemoryError("out of memory")

    subject._runner.bench.load = load  # type: ignore[method-assign]
    with pytest.raises(AutodispatchError, match="must fit into memory"):
        subject.tune(PROBLEM)


def test_a_time_in_which_the_weights_cannot_have_been_read_is_a_failure(store: TuningStore) -> None:
    device = like(CPU, bandwidth=4e12, l2_bytes=50 << 20)
    problem = Problem(16, 8192, 8192, "float32")  # at least 134 us
    runner = LocalRunner(FakeWorkbench(device))
    variants = [FakeVariant("skips", speeds=(20,)), FakeVariant("works", speeds=(200,))]
    decision = Tuner(store, runner, Registry(registry_of(*variants))).tune(problem)
    assert leader(store, decision).variant == "works"
    record = next(r for r in store.measurements() if r.variant == "skips")
    assert (record.status, record.median_us) == ("launch_failed", None)
    assert "it cannot have run" in record.reason


def test_a_result_that_is_wrong_after_many_launches_is_found(store: TuningStore) -> None:
    class Tiring(FakeWorkbench):
        def check(self, executable: Any, problem: Problem | None = None) -> Check:
            before = self.log.count(f"check {executable.name}")
            found = super().check(executable, problem)
            return Check("wrong_result", "tired") if executable.name == "tires" and before > 1 else found

    variants = [FakeVariant("tires", speeds=(1,)), FakeVariant("lasts", speeds=(10,))]
    decision = Tuner(store, LocalRunner(Tiring(CPU)), Registry(registry_of(*variants))).tune(PROBLEM)
    assert leader(store, decision).variant == "lasts"
    assert by_variant(store, "screen")["tires"].reason == "tired"


def test_a_result_that_is_wrong_only_where_tiles_hang_over_is_found(store: TuningStore) -> None:
    class Ragged(FakeWorkbench):
        def check(self, executable: Any, problem: Problem | None = None) -> Check:
            found = super().check(executable, problem)
            return Check("wrong_result", "cut off") if executable.name == "even" and problem is not None else found

    variants = [FakeVariant("even", speeds=(1,)), FakeVariant("any", speeds=(10,))]
    decision = Tuner(store, LocalRunner(Ragged(CPU)), Registry(registry_of(*variants))).tune(PROBLEM)
    assert leader(store, decision).variant == "any"
    record = by_variant(store, "screen")["even"]
    assert (record.status, record.reason) == ("wrong_result", "on 63,296,200 float32 kn: cut off")


@pytest.mark.parametrize(
    "shape", [(1, 8960, 1536), (16, 8960, 1536), (64, 4096, 4096), (128, 512, 1536), (4096, 8960, 1536)]
)
@pytest.mark.parametrize(("dtype", "layout"), [("bfloat16", "nk"), ("float16", "kn"), ("float32", "nk")])
def test_every_candidate_is_also_checked_where_its_tiles_hang_over(
    shape: tuple[int, int, int], dtype: str, layout: str
) -> None:
    problem = Problem(*shape, dtype, layout)
    for candidate in Registry().candidates(problem, H200):
        beside = overhanging(candidate, problem, H200)
        assert beside is not None, candidate
        tunables = vars(candidate.config)
        tile_m, tile_n = tunables.get("tile_m", 1), tunables.get("tile_n", 1)
        assert tile_m == 1 or beside.m == 1 or beside.m % tile_m
        assert tile_n in (1, 8) or beside.n % tile_n, candidate


def test_what_is_measured_beside_others_counts_as_incomplete(
    store: TuningStore, warnings_logged: pytest.LogCaptureFixture
) -> None:
    class Shared(FakeWorkbench):
        def foreign_load(self) -> int:
            return 40

    variants = [FakeVariant(f"v{i}", speeds=(20 - i,)) for i in range(10)]
    slowed = {"v9": lambda: 60.0}  # the fastest by far, when nobody is beside
    runner = LocalRunner(Shared(CPU, slowed))
    decision = Tuner(store, runner, Registry(registry_of(*variants))).tune(PROBLEM)
    assert not decision.complete and leader(store, decision).variant != "v9"
    assert "busy for 40 % of the time" in warnings_logged.text
    assert {r.reason for r in store.measurements()} == {
        "measured beside others, who kept the device busy for 40 % of the time"
    }
    alone = tuner(store, *variants, times={"v9": lambda: 5.0})
    again = alone.tune(PROBLEM)
    assert again.complete and leader(store, again).variant == "v9"
    assert len(checked(alone)) == 10
    assert alone.is_tuned(PROBLEM)


def test_times_that_change_much_during_the_finals_make_no_complete_decision(
    store: TuningStore, monkeypatch: pytest.MonkeyPatch, warnings_logged: pytest.LogCaptureFixture
) -> None:
    class OnGpu(FakeVariant):
        kind = "cuda"

    class Slowing(LocalRunner):
        def finals(self, candidates: Sequence[Candidate], rounds: int, deadline: float | None = None) -> list[Outcome]:
            timing = Timing(tuple(10.0 * (1 + 0.015 * i) for i in range(rounds)))
            return [Outcome(Check("ok"), timing) for _ in candidates]

    monkeypatch.setattr(tuner_module, "environment", lambda device: environment(CPU))
    registry = Registry(registry_of(OnGpu("any")))
    decision = Tuner(store, Slowing(FakeWorkbench(H200)), registry).tune(PROBLEM)
    assert not decision.complete
    assert "during the finals" in warnings_logged.text
    assert Tuner(store, LocalRunner(FakeWorkbench(H200)), registry).tune(PROBLEM).complete
    assert Tuner(store, Slowing(FakeWorkbench(CPU)), Registry(registry_of(FakeVariant("any")))).tune(PROBLEM).complete


def test_a_tuner_says_where_the_time_went(store: TuningStore) -> None:
    class Slow(FakeWorkbench):
        def load(self, problem: Problem, copies: int | None = None) -> None:
            time.sleep(0.06)

        def check(self, executable: Any, problem: Problem | None = None) -> Check:
            time.sleep(0.05)
            return super().check(executable, problem)

    class SlowToBuild(FakeVariant):
        def executable(self, *arguments: Any) -> Any:
            time.sleep(0.3)
            return super().executable(*arguments)

    subject = Tuner(store, LocalRunner(Slow(CPU)), Registry(registry_of(SlowToBuild("any"), FakeVariant("other"))))
    subject.tune(PROBLEM)
    assert set(subject.spent) == {"loading", "building", "checking", "timing", "finals"}
    assert subject.spent["loading"] >= 0.06
    assert subject.spent["building"] >= 0.2
    assert subject.spent["checking"] >= 4 * 0.05  # of each on the problem, and where tiles hang over
    assert subject.spent["timing"] >= 2 * 0.03
    assert sum(subject.spent.values()) < 60
