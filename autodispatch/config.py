"""Config, ConfigSpace, Restriction: the tunables of a variant, and which of their values a device and problem allow."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from autodispatch.device import DeviceInfo
from autodispatch.problem import Problem


@dataclass(frozen=True)
class Config:
    """The values of a variant's tunables. Each variant has its own subclass; all else is derived from the fields."""

    def to_json(self) -> str:
        """The values as JSON, in the order of the fields: the form in which a config is stored and compared."""
        return json.dumps({f.name: getattr(self, f.name) for f in fields(self)}, separators=(",", ":"))

    def __str__(self) -> str:
        return " ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self))


@dataclass(frozen=True)
class Restriction:
    """A condition that a config must meet on a device for a problem, and the words for when it does not.

    `is_fixed` says that `holds` looks at the config alone, so that it need not be asked again for every problem.
    """

    holds: Callable[[Any, Problem, DeviceInfo], bool]
    message: str
    is_fixed: bool = False


@dataclass(frozen=True)
class ConfigSpace:
    """The allowed values of each tunable, and the restrictions on their combinations."""

    config_type: type[Config]
    axes: Mapping[str, tuple[Any, ...]]
    restrictions: tuple[Restriction, ...] = ()

    def __iter__(self) -> Iterator[Config]:
        """Every combination, legal or not."""
        return (self.config_type(**values) for values in self._combinations())

    def _combinations(self) -> Iterator[dict[str, Any]]:
        return (dict(zip(self.axes, values, strict=True)) for values in itertools.product(*self.axes.values()))

    @cached_property
    def _sound(self) -> tuple[Config, ...]:
        """The combinations that meet the fixed restrictions, of which there may be a few among very many."""
        fixed: list[Callable[..., bool]] = [r.holds for r in self.restrictions if r.is_fixed]
        probe = object.__new__(self.config_type)  # takes all values in turn: making a config takes longer than asking

        def is_sound(values: dict[str, Any]) -> bool:
            probe.__dict__.update(values)
            return all(holds(probe, None, None) for holds in fixed)

        return tuple(self.config_type(**values) for values in self._combinations() if is_sound(values))

    def legal(self, problem: Problem, device: DeviceInfo) -> Iterator[Config]:
        """The combinations that meet every restriction."""
        others = [r.holds for r in self.restrictions if not r.is_fixed]
        return (c for c in self._sound if all(holds(c, problem, device) for holds in others))

    def refused(self, problem: Problem, device: DeviceInfo) -> Counter[str]:
        """How many combinations are not legal here, though by themselves they are sound, by the message of the first
        restriction that each does not meet."""
        others = [r for r in self.restrictions if not r.is_fixed]
        unmet = (next((r.message for r in others if not r.holds(c, problem, device)), "") for c in self._sound)
        return Counter(message for message in unmet if message)

    def violations(self, config: Config, problem: Problem, device: DeviceInfo) -> list[str]:
        """The messages of the restrictions that the config does not meet; empty if it is legal."""
        return [r.message for r in self.restrictions if not r.holds(config, problem, device)]

    def parse(self, text: str) -> Config:
        """The config of a stored text. Raises ValueError for an unknown name or a value outside the axes."""
        values = json.loads(text)
        if not isinstance(values, dict) or set(values) != set(self.axes):
            raise ValueError(f"config must name {', '.join(self.axes) or 'nothing'} (got {text})")
        for name, value in values.items():
            if not any(value == known and type(value) is type(known) for known in self.axes[name]):
                raise ValueError(f"{name} must be one of {self.axes[name]} (got {value!r})")
        return self.config_type(**values)
