"""Records for the tests of stores and of what they exchange."""

from __future__ import annotations

from autodispatch import resources
from autodispatch.device import DeviceInfo, cpu_device, environment
from autodispatch.layers import Layers
from autodispatch.problem import Problem
from autodispatch.records import (
    DecisionRecord,
    DeviceRecord,
    EnvironmentRecord,
    MeasurementRecord,
    SessionRecord,
    problem_fields,
)
from autodispatch.store import TuningStore
from autodispatch.variants import VARIANTS
from tests.fakes import H200

CPU = cpu_device()
PROBLEM = Problem(8, 16, 32, "float32")
SEEDS = resources.seeds()  # as shipped: within a test there are none


def begin(store: TuningStore, session: str = "s1", host: str = "h", device: DeviceInfo = CPU) -> None:
    env = EnvironmentRecord.of(environment(CPU))
    record = SessionRecord(
        id=session,
        device_key=device.key,
        environment_id=env.id,
        started_at="2026-01-01T00:00:00+00:00",
        host=host,
        command="c",
        protocol_version=1,
    )
    store.begin_session(DeviceRecord.of(device), env, record)


def measurement(
    problem: Problem = PROBLEM, median: float = 10.0, session: str = "s1", **more: object
) -> MeasurementRecord:
    fields: dict[str, object] = {
        "session_id": session,
        "device_key": CPU.key,
        **problem_fields(problem),
        "regime": "eager-cold",
        "stage": "final",
        "variant": "cpu_split",
        "config": "{}",
        "digest": "d",
        "status": "ok",
        "reason": "",
        "median_us": median,
        "p20_us": median,
        "p80_us": median,
        "mad_us": 0.0,
        "samples_us": [median],
        "workspace_bytes": 0,
        "measured_at": "2026-01-01T00:00:00+00:00",
    }
    return MeasurementRecord.of(**{**fields, **more})


def decision(problem: Problem, leader: MeasurementRecord, at: str = "2026-01-01T00:00:00+00:00") -> DecisionRecord:
    return DecisionRecord(
        device_key=leader.device_key,
        **problem_fields(problem),
        regime=leader.regime,
        leader=leader.id,
        finalists=[leader.id],
        session_id=leader.session_id,
        decided_at=at,
    )


def filled(store: TuningStore, problem: Problem = PROBLEM, median: float = 10.0) -> DecisionRecord:
    begin(store)
    record = measurement(problem, median)
    store.add_measurement(record)
    made = decision(problem, record)
    store.set_decision(made)
    return made


def decided(problem: Problem, variant: str, **config: int) -> Layers:
    """A store in which a config of a variant was found the fastest on an H200, in 41 us."""
    found = VARIANTS[variant].candidates(problem, H200)
    leader = next(c for c in found if config.items() <= c.config.__dict__.items())
    store = TuningStore()
    begin(store, device=H200)
    more = {"device_key": H200.key, "regime": "graph-cold", "digest": leader.variant.digest, "max_error": 1e-3}
    record = measurement(problem, 41.0, variant=variant, config=leader.config.to_json(), **more)
    store.add_measurement(record)
    store.set_decision(decision(problem, record))
    return Layers([("user", store)])
