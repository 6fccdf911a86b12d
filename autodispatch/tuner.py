"""Tuner: enumerate, compile, check, screen, finals, decide, and store each result when it is there."""

from __future__ import annotations

import logging
import math
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from autodispatch import benchmark, heuristics
from autodispatch.benchmark import Timing
from autodispatch.decision import STEADY, Finalist, decide, drift, finalists
from autodispatch.device import DeviceInfo, environment
from autodispatch.errors import AutodispatchError, UnsupportedProblemError
from autodispatch.locks import timing_on
from autodispatch.problem import Problem
from autodispatch.records import (
    PROTOCOL_VERSION,
    DecisionRecord,
    DeviceRecord,
    EnvironmentRecord,
    MeasurementRecord,
    SessionRecord,
    now,
    problem_fields,
)
from autodispatch.reference import Check
from autodispatch.runner import Outcome, Runner
from autodispatch.selection import stored_candidate
from autodispatch.store import TuningStore
from autodispatch.variants import Candidate, Registry

_log = logging.getLogger("autodispatch")
_LASTING = {"compile_failed", "launch_failed", "wrong_result", "out_of_bounds", "timeout", "crashed"}
_QUICK_PER_PATH = 14
_QUICK_PER_TILE = 3  # of those
_FULL_WITHIN = 2.0  # times the best by the model


@dataclass(frozen=True)
class Progress:
    """What a listener is told: `done` of `total` steps of a problem, and what was found last.

    `is_hit` says that the record was in the store already.
    """

    problem: Problem
    stage: str
    done: int
    total: int
    candidate: Candidate | None = None
    record: MeasurementRecord | None = None
    is_hit: bool = False


@dataclass(frozen=True)
class Result:
    """A candidate after checking and timing. `timing` is None where it failed."""

    candidate: Candidate
    check: Check
    timing: Timing | None
    record: MeasurementRecord


class Tuner:
    """Tunes problems on one device into one store. The runner says where and how candidates are tried.

    `spent` are the seconds of the last tuning, by what they went into.
    """

    def __init__(
        self,
        store: TuningStore,
        runner: Runner,
        registry: Registry | None = None,
        *,
        command: str = "",
        listener: Callable[[Progress], None] | None = None,
    ) -> None:
        self._store = store
        self._runner = runner
        self._device = runner.device
        self._registry = registry or Registry()
        self._command = command
        self._listener = listener or (lambda progress: None)
        self._session: str | None = None
        self._versions: EnvironmentRecord | None = None
        self._beside = ""  # what is noted with measurements made beside others
        self.spent: Counter[str] = Counter()

    @property
    def device(self) -> DeviceInfo:
        return self._device

    def close(self) -> None:
        """Ends what the runner had started."""
        self._runner.close()

    def tune(self, problem: Problem, *, effort: str = "quick", budget_s: float | None = None) -> DecisionRecord:
        """Measures the candidates of a problem, stores every measurement as it is made, and stores the decision.

        `effort` "quick" tries the defaults and the likely winners of each path, "full" also all that the cost model
        expects to take at most twice the time of its best. When `budget_s` seconds are over the candidate that is
        being timed is left, and the rounds of the finals end; what was finished is decided on, and the next tuning goes
        on from there. One step is done in any case: a candidate, or, where all were tried, the finals.
        Where another process tuned the problem while this one waited for the device, its decision is taken.

        Raises UnsupportedProblemError for a problem without work, AutodispatchError if no candidate was right.
        """
        if 0 in (problem.m, problem.n, problem.k):
            raise UnsupportedProblemError(f"m, n and k must be positive to be tuned (got {problem})")
        self._runner.require()
        deadline = None if budget_s is None else time.monotonic() + budget_s
        candidates = self.shortlist(problem, effort)
        self.spent.clear()
        before = self._decision(problem)
        with timing_on(self._device.uuid):  # another process may have tuned it while this one waited
            decision = self._decision(problem)
            if decision is not None and decision != before and self.is_tuned(problem, effort):
                return decision
            incumbent = self._incumbent(problem)
            if incumbent is not None and incumbent not in candidates:
                candidates.insert(0, incumbent)
            known = self._known(problem, candidates)
            with self._loaded(problem, [c for c in candidates if c not in known]) as alone:
                results = self._screen(problem, candidates, deadline, known)
                complete = alone and len(results) == len(candidates)
                last = deadline if _progressed(results, known) else None
                return self._conclude(problem, results, incumbent, complete, last)

    def is_tuned(self, problem: Problem, effort: str = "quick") -> bool:
        """Whether a complete decision is there and all candidates of the effort were tried with today's kernels."""
        decision = self._decision(problem)
        leader = self._store.measurement(decision.leader) if decision is not None and decision.complete else None
        if leader is None or stored_candidate(leader, problem, self._device, self._registry) is None:
            return False
        tried = {(r.variant, r.config, r.digest) for r in self._store.measurements(self._device.key, problem)}
        return all((*c.key, c.variant.digest) in tried for c in self.shortlist(problem, effort))

    def has_decision(self, problem: Problem) -> bool:
        """Whether something was decided, though it may be incomplete, or of older kernels."""
        return self._decision(problem) is not None

    def _decision(self, problem: Problem) -> DecisionRecord | None:
        return self._store.decision(self._device.key, problem, self._runner.regime)

    def retime(self, problem: Problem, candidates: Sequence[Candidate]) -> DecisionRecord:
        """Measures some candidates, of which the first is in place, and stores the decision between them as incomplete.

        Raises AutodispatchError if none was right.
        """
        self._runner.require()
        with timing_on(self._device.uuid), self._loaded(problem, candidates):
            results = self._screen(problem, candidates, None, {})
            return self._conclude(problem, results, candidates[0], False)

    def _conclude(
        self,
        problem: Problem,
        results: list[Result],
        incumbent: Candidate | None,
        complete: bool,
        deadline: float | None = None,
    ) -> DecisionRecord:
        """Plays the finals between what came through the screening."""
        good = [r for r in results if r.timing is not None]
        if not good:
            reasons = "; ".join(f"{r.candidate}: {r.check.status} {r.check.reason}" for r in results[:5])
            raise AutodispatchError(
                f"some candidate must be right for {problem} (got none of {len(results)}: {reasons})"
            )
        default = self.default(problem)
        always = (incumbent, default, self._registry.library(problem, self._device))
        by_candidate = {r.candidate: r for r in good}
        played = finalists({r.candidate: r.timing for r in good if r.timing is not None}, always)
        try:
            return self._finals(problem, [by_candidate[c] for c in played], incumbent, default, complete, deadline)
        except MemoryError as cause:
            raise AutodispatchError(f"the finals of {problem} must fit into memory ({cause})") from cause

    def survey(self, problem: Problem, candidates: Sequence[Candidate] | None = None, rounds: int = 10) -> list[Result]:
        """Times candidates against each other in interleaved rounds without deciding; fastest first, failures last."""
        self._runner.require()
        chosen = list(candidates or self.shortlist(problem, "quick"))
        with timing_on(self._device.uuid), self._loaded(problem, chosen):
            results = self._screen(problem, chosen, None, {})
            good = [r.candidate for r in results if r.timing is not None]
            outcomes = self._runner.finals(good, rounds)
            timed = [self._result(problem, c, o, "final") for c, o in zip(good, outcomes, strict=True)]
            failed = [r for r in results if r.timing is None]
            return sorted(timed, key=lambda r: r.timing.median if r.timing else math.inf) + failed

    @contextmanager
    def _counted(self, step: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.spent[step] += time.monotonic() - start  # type: ignore[assignment]

    @contextmanager
    def _loaded(self, problem: Problem, candidates: Sequence[Candidate]) -> Iterator[bool]:
        """Whether the device is ours alone."""
        try:
            try:
                with self._counted("loading"):
                    foreign_load = self._runner.load(problem, candidates)
            except MemoryError as cause:
                raise AutodispatchError(
                    f"the inputs and the reference of {problem} must fit into memory ({cause})"
                ) from cause
            if foreign_load:
                message = "others keep %s busy for %d %% of the time; what is decided for %s counts as incomplete"
                _log.warning(message, self._device.name, foreign_load, problem)
                self._beside = f"measured beside others, who kept the device busy for {foreign_load} % of the time"
            yield not foreign_load
        finally:
            self._beside = ""
            self._runner.unload()

    def _known(self, problem: Problem, candidates: Sequence[Candidate]) -> dict[Candidate, Result]:
        """What need not be measured again: how a candidate failed with the same kernels and versions, and, where an
        earlier tuning did not come to its end, what it had measured with nobody beside."""
        decision = self._decision(problem)
        since = decision.decided_at if decision is not None and decision.complete else ""
        environment_id = self._environment().id
        records = self._store.screened(self._device.key, problem, self._runner.regime, environment_id, PROTOCOL_VERSION)
        latest = {(r.variant, r.config, r.digest): r for r in records}
        found = {}
        for candidate in candidates:
            record = latest.get((*candidate.key, candidate.variant.digest))
            if record is not None and (
                record.status in _LASTING
                or (record.status == "ok" and not record.reason and record.measured_at > since)
            ):
                check = Check(record.status, record.reason, record.relative_error, record.max_error)
                timing = Timing(tuple(record.samples_us)) if record.samples_us else None
                found[candidate] = Result(candidate, check, timing, record)
        return found

    def shortlist(self, problem: Problem, effort: str) -> list[Candidate]:
        """The candidates to try, likely winners first: always each variant's default and the library."""
        ranked = heuristics.rank(self._registry.candidates(problem, self._device), problem, self._device)
        kept = set(self._registry.defaults(problem, self._device))
        if effort == "full":
            kept.update(heuristics.near_best(ranked, _FULL_WITHIN, problem, self._device))
        chosen: Counter[tuple[object, ...]] = Counter()
        for candidate in ranked:
            path, tile = (candidate.variant.path,), candidate.tile
            if chosen[path] < _QUICK_PER_PATH and chosen[tile] < _QUICK_PER_TILE:
                chosen.update((path, tile))
                kept.add(candidate)
        return [c for c in ranked if c in kept]

    def default(self, problem: Problem) -> Candidate:
        """What a call would run without tuning."""
        return heuristics.rank(self._registry.candidates(problem, self._device), problem, self._device)[0]

    def _screen(
        self,
        problem: Problem,
        candidates: Sequence[Candidate],
        deadline: float | None,
        known: Mapping[Candidate, Result],
    ) -> list[Result]:
        """Tries each candidate of which nothing is known, and stores how it went, whatever happens to it."""
        results = list(known.values())
        best = min((r.timing.median for r in results if r.timing), default=None)
        for i, r in enumerate(results, start=1):
            self._listener(Progress(problem, "screen", i, len(candidates), r.candidate, r.record, is_hit=True))
        for i, candidate in enumerate((c for c in candidates if c not in known), start=len(known)):
            end = None  # one at least comes to its end, each time
            if deadline is not None and _progressed(results, known) and any(r.timing for r in results):
                end = deadline - _round_s(results)
            outcome = None
            if not benchmark.is_over(end):
                self._listener(Progress(problem, "screen", i, len(candidates), candidate))
                outcome = self._runner.screen(candidate, best, end)
                self.spent.update(outcome.spent._asdict())
            if outcome is None or (outcome.timing is not None and benchmark.is_over(end)):
                _log.info("the budget is used up after %d of %d candidates", i, len(candidates))
                break
            result = self._result(problem, candidate, outcome, "screen")
            if result.timing is not None:
                best = min(best or result.timing.median, result.timing.median)
            results.append(result)
            self._listener(Progress(problem, "screen", i + 1, len(candidates), candidate, result.record))
        return results

    def _result(self, problem: Problem, candidate: Candidate, outcome: Outcome, stage: str) -> Result:
        """Stores a measurement and returns the result with it."""
        check, timing, reading, resources = outcome.check, outcome.timing, outcome.reading, outcome.resources
        record = MeasurementRecord.of(
            session_id=self._begin_session(),
            device_key=self._device.key,
            **problem_fields(problem),
            regime=self._runner.regime,
            stage=stage,
            variant=candidate.variant.name,
            config=candidate.config.to_json(),
            digest=candidate.variant.digest,
            status=check.status,
            reason=(check.reason or self._beside)[:4000],
            median_us=round(timing.median, 4) if timing else None,
            p20_us=round(timing.percentile(20), 4) if timing else None,
            p80_us=round(timing.percentile(80), 4) if timing else None,
            mad_us=round(timing.mad, 4) if timing else None,
            samples_us=[round(s, 3) for s in timing.samples] if timing else [],
            relative_error=check.relative_error,
            max_error=check.max_error,
            registers=resources.registers if resources else None,
            spill_bytes=resources.spill_bytes if resources else None,
            shared_bytes=outcome.shared_bytes,
            workspace_bytes=outcome.workspace_bytes,
            clock_mhz=reading.sm_clock_mhz if reading else None,
            temperature_c=reading.temperature_c if reading else None,
            measured_at=now(),
        )
        self._store.add_measurement(record)
        return Result(candidate, check, timing, record)

    def _incumbent(self, problem: Problem) -> Candidate | None:
        """The candidate that an earlier tuning decided on, if it can still serve."""
        decision = self._decision(problem)
        record = self._store.measurement(decision.leader) if decision else None
        try:
            candidate = self._registry.parse(record.variant, record.config) if record else None
        except ValueError:  # of another version
            return None
        return candidate if candidate is not None and candidate.is_legal(problem, self._device) else None

    def _finals(
        self,
        problem: Problem,
        screened: list[Result],
        incumbent: Candidate | None,
        default: Candidate,
        complete: bool,
        deadline: float | None,
    ) -> DecisionRecord:
        self._listener(Progress(problem, "finals", 0, 1))
        candidates = [r.candidate for r in screened]
        with self._counted("finals"):
            outcomes = self._runner.finals(candidates, benchmark.FINAL_ROUNDS, deadline)
        played, records = [], {}
        for before, outcome in zip(screened, outcomes, strict=True):
            candidate = before.candidate
            if outcome.timing is None:  # as it would have been found when it was screened
                self._result(problem, candidate, outcome, "screen")
                continue
            checked = replace(outcome, check=before.check)
            key = candidate.key
            records[key] = self._result(problem, candidate, checked, "final").record
            error = before.check.relative_error or 0.0
            samples = outcome.timing.samples
            places = (candidate == incumbent, candidate == default)
            played.append(Finalist(key, samples, error, outcome.workspace_bytes, *places))
        if not played:
            reasons = "; ".join(f"{c}: {o.check.status}" for c, o in zip(candidates, outcomes, strict=True))
            raise AutodispatchError(f"some candidate must come through the finals of {problem} (got none: {reasons})")
        verdict = decide(played)
        complete = complete and len(verdict.pick.samples) == benchmark.FINAL_ROUNDS
        # on a processor, whose wall clock counts all that runs beside, such a change says nothing
        steady = self._device.kind == "cpu" or drift(verdict.pick.samples) <= STEADY
        if not steady:
            _log.warning("times of %s drifted during the finals; the decision counts as incomplete", problem)
        leader = records[verdict.pick.name]
        others = [r for r in records.values() if r is not leader]
        others.sort(key=lambda r: (r.median_us, r.variant, r.config))
        decision = DecisionRecord(
            device_key=self._device.key,
            **problem_fields(problem),
            regime=self._runner.regime,
            leader=leader.id,
            finalists=[leader.id, *(r.id for r in others)],
            ties=[records[f.name].id for f in verdict.ties],
            complete=complete and steady,
            session_id=self._begin_session(),
            decided_at=now(),
        )
        self._store.set_decision(decision)
        pick = next(c for c in candidates if c.key == verdict.pick.name)
        self._listener(Progress(problem, "finals", 1, 1, pick, leader))
        return decision

    def _environment(self) -> EnvironmentRecord:
        if self._versions is None:
            self._versions = EnvironmentRecord.of(environment(self._device))
        return self._versions

    def _begin_session(self) -> str:
        if self._session is None:
            versions = self._environment()
            session = SessionRecord(
                id=uuid.uuid4().hex,
                device_key=self._device.key,
                environment_id=versions.id,
                started_at=now(),
                host=socket.gethostname(),
                command=self._command[:2000],
                protocol_version=PROTOCOL_VERSION,
            )
            self._store.begin_session(DeviceRecord.of(self._device), versions, session)
            self._session = session.id
        return self._session


def _progressed(results: Sequence[Result], known: Mapping[Candidate, Result]) -> bool:
    """Whether something was found out that the next tuning knows."""
    return any(r.candidate not in known and (r.timing is not None or r.check.status in _LASTING) for r in results)


def _round_s(results: Sequence[Result]) -> float:
    """About how long one round of the finals takes."""
    timings = {r.candidate: r.timing for r in results if r.timing is not None}
    return sum(max(benchmark.UNIT_S, timings[c].median / 1e6) for c in finalists(timings))
