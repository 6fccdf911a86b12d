"""Config, ConfigSpace, Restriction: the tunables of a variant, and which of their values a device and problem allow."""

from __future__ import annotations

import itertools
import json
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
    """A condition that a config must meet on a device for a problem, and the words for when it does not."""

    holds: Callable[[Any, Problem, DeviceInfo], bool]
    message: str


@dataclass(frozen=True)
class ConfigSpace:
    """The allowed values of each tunable, and the restrictions on their combinations."""

    config_type: type[Config]
    axes: Mapping[str, tuple[Any, ...]]
    restrictions: tuple[Restriction, ...] = ()

    @cached_property
    def _configs(self) -> tuple[Config, ...]:
        products = itertools.product(*self.axes.values())
        return tuple(self.config_type(**dict(zip(self.axes, values, strict=True))) for values in products)

    def __iter__(self) -> Iterator[Config]:
        """Every combination, legal or not."""
        return iter(self._configs)

    def legal(self, problem: Problem, device: DeviceInfo) -> Iterator[Config]:
        """The combinations that meet every restriction."""
        return (c for c in self if all(r.holds(c, problem, device) for r in self.restrictions))

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
