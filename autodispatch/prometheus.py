"""The counters for Prometheus, through the optional package prometheus_client (the extra `prometheus`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from autodispatch import dispatcher
from autodispatch.dispatcher import Dispatcher
from autodispatch.metrics import Counters

_HELP = {
    "calls": "Launches by the origin of what served them.",
    "misses": "Problems that were not tuned when they first came.",
    "compiles": "Kernels that were built, or taken from the cache on disk.",
    "tunings": "Problems that were tuned within calls or in the background.",
    "fallbacks": "Candidates that did not build, and calls without scratch memory.",
    "copies": "Arguments that were copied since no kernel can read them as they lie.",
}


class _Collector(Collector):
    def __init__(self, source: Dispatcher | None) -> None:
        self._source = source

    def collect(self) -> Iterator[Any]:
        found = self._source.counters() if self._source is not None else dispatcher.counters()
        for field in fields(Counters):
            by_origin = field.name == "calls"
            family = CounterMetricFamily(
                f"autodispatch_{field.name}", _HELP[field.name], labels=["origin"] if by_origin else []
            )
            if by_origin:
                for origin, count in found.calls.items():
                    family.add_metric([origin], count)
            else:
                family.add_metric([], getattr(found, field.name))
            yield family


def register(source: Dispatcher | None = None, registry: Any = REGISTRY) -> Collector:
    """Lets a registry collect the counters of a dispatcher, by default the process's own, as `autodispatch_calls_total`
    (by origin), `autodispatch_misses_total` and so on. Returns the collector, which the registry can forget again."""
    collector = _Collector(source)
    registry.register(collector)
    return collector
