"""Records: what enters and leaves the store, validated at the edge."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from datetime import datetime, timezone
from functools import cache, lru_cache
from operator import attrgetter
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import to_json

from autodispatch.device import DeviceInfo
from autodispatch.problem import Problem

PROTOCOL_VERSION = 3  # 2: a rest after each timed unit; 3: shorter screening of more candidates
_as_json = json.JSONEncoder(separators=(",", ":")).encode
_PLAIN = (1e-4, 1e16)  # between these, and 0, floats are written without an exponent
PROBLEM_FIELDS = ("m", "n", "k", "dtype", "layout", "alignment", "activation", "precision", "math")
Status = Literal[
    "ok",
    "compile_failed",
    "launch_failed",
    "wrong_result",
    "out_of_bounds",
    "timeout",
    "out_of_memory",
    "crashed",
]
Stage = Literal["screen", "final"]
_LARGEST = 2**63 - 1  # that SQLite holds
Integer = Annotated[int, Field(ge=-_LARGEST, le=_LARGEST)]


def now() -> str:
    """The time in UTC, to the millisecond."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


class Record(BaseModel):
    """Base of all records: immutable, of known fields of known types only."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    @cache
    def columns(cls) -> tuple[str, ...]:
        return tuple(cls.model_fields)

    @classmethod
    @cache
    def _values_of(cls) -> Callable[[Record], tuple[Any, ...]]:
        return attrgetter(*cls.columns())

    def values(self) -> tuple[Any, ...]:
        """The fields in the order of the columns; of plain types, so that there is nothing to convert."""
        return self._values_of()(self)

    def content(self) -> dict[str, Any]:
        """The fields by name, in the order of the columns."""
        return dict(zip(self.columns(), self.values(), strict=True))


class DeviceRecord(Record):
    """A device model by what must match, and the attributes that the cost model reads."""

    key: str = Field(max_length=200)
    kind: Literal["cuda", "cpu"]
    name: str = Field(max_length=200)
    compute_capability: str = Field(max_length=8)
    sm_count: int = Field(ge=1, le=_LARGEST)
    memory_gib: int = Field(ge=0, le=_LARGEST)
    mig_profile: str = Field(max_length=50)
    l2_bytes: int = Field(ge=0, le=_LARGEST)
    shared_bytes_per_block: int = Field(ge=0, le=_LARGEST)
    clock_khz: int = Field(ge=0, le=_LARGEST)
    bandwidth: float = Field(ge=0)

    @classmethod
    def of(cls, device: DeviceInfo) -> DeviceRecord:
        return cls(
            key=device.key,
            **device.identity,
            l2_bytes=device.l2_bytes,
            shared_bytes_per_block=device.shared_bytes_per_block,
            clock_khz=device.clock_khz,
            bandwidth=device.bandwidth,
        )


class EnvironmentRecord(Record):
    """The versions that a session ran with; `id` is the hash of the rest."""

    id: str = Field(max_length=64)
    python: str = Field(max_length=50)
    numpy: str = Field(max_length=50)
    autodispatch: str = Field(max_length=50)
    platform: str = Field(max_length=100)
    driver: str = Field(max_length=50)
    cuda_runtime: str = Field(max_length=50)
    nvrtc: str = Field(max_length=50)
    cupy: str = Field(max_length=50)

    @classmethod
    def of(cls, versions: dict[str, str]) -> EnvironmentRecord:
        return cls(id=content_hash(versions), **versions)


class SessionRecord(Record):
    """One tuning run."""

    id: str = Field(max_length=64)
    device_key: str = Field(max_length=200)
    environment_id: str = Field(max_length=64)
    started_at: str = Field(max_length=40)
    host: str = Field(max_length=200)
    command: str = Field(max_length=2000)
    protocol_version: int = Field(ge=1, le=_LARGEST)


class ProblemRecord(Record):
    """The fields of a problem, as columns."""

    m: int = Field(ge=0, le=_LARGEST)
    n: int = Field(ge=0, le=_LARGEST)
    k: int = Field(ge=0, le=_LARGEST)
    dtype: str = Field(max_length=20)
    layout: str = Field(max_length=4)
    alignment: Integer
    activation: str = Field(max_length=20)
    precision: str = Field(max_length=10)
    math: str = Field(max_length=10)

    @property
    def problem(self) -> Problem:
        return _problem(*_fields_of_problem(self))


class MeasurementRecord(ProblemRecord):
    """One candidate on one problem: how it ended, how long it took, how wrong it was, what it used.

    Times are microseconds per launch. `id` is the hash of all else, so that merging is a union of sets.
    """

    id: str = Field(max_length=64)
    session_id: str = Field(max_length=64)
    device_key: str = Field(max_length=200)
    regime: str = Field(max_length=20)
    stage: Stage
    variant: str = Field(max_length=50)
    config: str = Field(max_length=2000)
    digest: str = Field(max_length=64)
    status: Status
    reason: str = Field(max_length=4000)
    median_us: float | None = Field(default=None, gt=0)
    p20_us: float | None = Field(default=None, gt=0)
    p80_us: float | None = Field(default=None, gt=0)
    mad_us: float | None = Field(default=None, ge=0)
    samples_us: list[float] = Field(max_length=1000)
    relative_error: float | None = Field(default=None, ge=0)
    max_error: float | None = Field(default=None, ge=0)
    registers: Integer | None = None
    spill_bytes: Integer | None = None
    shared_bytes: Integer | None = None
    workspace_bytes: int = Field(ge=0, le=_LARGEST)
    clock_mhz: Integer | None = None
    temperature_c: Integer | None = None
    measured_at: str = Field(max_length=40)

    @classmethod
    def of(cls, **fields: Any) -> MeasurementRecord:
        """A record with its id computed."""
        draft = cls(id="", **fields)
        return draft.model_copy(update={"id": draft.content_id})

    @property
    def content_id(self) -> str:
        names, values_of = self._all_but_id()
        content = dict(zip(names, values_of(self), strict=True))
        if self._has_plain_numbers():  # most of a large import is hashing, and pydantic writes JSON faster
            text = to_json(content)
            if text.isascii() and b"\\u" not in text and b"\x7f" not in text:  # as the standard library would
                return _digest(text)
        return _digest(_as_json(content).encode())

    def _has_plain_numbers(self) -> bool:
        low, high = _PLAIN
        samples = self.samples_us
        numbers = (self.median_us, self.p20_us, self.p80_us, self.mad_us, self.relative_error, self.max_error)
        return (not samples or (min(samples) >= low and max(samples) < high)) and all(
            not x or low <= x < high for x in numbers
        )

    @classmethod
    @cache
    def _all_but_id(cls) -> tuple[tuple[str, ...], Callable[[Record], tuple[Any, ...]]]:
        """The fields that make the id, sorted, and what reads them off a record."""
        names = tuple(sorted(c for c in cls.columns() if c != "id"))
        return names, attrgetter(*names)


class DecisionRecord(ProblemRecord):
    """What was concluded for a problem: the leader, and the finalists it was measured against (leader first).

    `ties` are those that cannot be told from the fastest; `complete` is false where a budget ended the tuning.
    """

    device_key: str = Field(max_length=200)
    regime: str = Field(max_length=20)
    leader: str = Field(max_length=64)
    finalists: list[str] = Field(max_length=100)
    ties: list[str] = Field(default_factory=list, max_length=100)
    complete: bool = True
    session_id: str = Field(max_length=64)
    decided_at: str = Field(max_length=40)

    @model_validator(mode="after")
    def _ties_are_finalists(self) -> DecisionRecord:
        if not set(self.ties) <= set(self.finalists):
            raise ValueError("ties must be among the finalists")
        return self

    @field_validator("complete", mode="before")
    @classmethod
    def _as_stored(cls, value: Any) -> Any:
        """SQLite keeps truth values as 0 and 1."""
        return bool(value) if type(value) is int and value in (0, 1) else value


_fields_of_problem = attrgetter(*PROBLEM_FIELDS)


@lru_cache(maxsize=4096)
def _problem(*fields: Any) -> Problem:
    """Of a problem there are many measurements."""
    return Problem(*fields)


def problem_fields(problem: Problem) -> dict[str, Any]:
    return {f: getattr(problem, f) for f in PROBLEM_FIELDS}


def content_hash(content: dict[str, Any]) -> str:
    """A hash of named values that depends neither on their order nor on the machine."""
    return _digest(_as_json(dict(sorted(content.items()))).encode())


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:32]
