"""Tables for people and JSON for scripts, out of stored records and fresh results."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from autodispatch.device import DeviceInfo
from autodispatch.explanation import Explanation
from autodispatch.heuristics import predict
from autodispatch.layers import Layers
from autodispatch.problem import Problem
from autodispatch.records import DecisionRecord, MeasurementRecord
from autodispatch.store import TuningStore
from autodispatch.tuner import Result
from autodispatch.variants import Candidate, Registry


def short_config(config: str) -> str:
    """A stored config as one line: `128x64x32 stages=4 warps=4`."""
    values = json.loads(config)
    tile = "x".join(str(values.pop(k)) for k in ("tile_m", "tile_n", "tile_k") if k in values)
    rest = [f"{k.removeprefix('num_')}={v}" for k, v in values.items()]
    return " ".join(([tile] if tile else []) + rest)


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def rate(problem: Problem, median_us: float) -> str:
    """Arithmetic and traffic at a measured time: TFLOP/s of the products, GB/s of the fewest bytes."""
    tera = problem.flops / median_us / 1e6
    giga = problem.bytes_moved / median_us / 1e3
    return f"{tera:.1f} TFLOP/s, {giga:.0f} GB/s"


def survey_table(problem: Problem, device: DeviceInfo, results: Sequence[Result], library: str | None) -> Table:
    """All candidates of one run, fastest first, beside the library."""
    table = Table(title=f"{problem} on {device.name}", title_justify="left")
    for name in ("candidate", "path", "median us", "mad", "vs library", "rel. error", "status"):
        table.add_column(name, justify="left" if name in ("candidate", "path", "status") else "right")
    baseline = _median_of(results, library)
    for r in results:
        median = r.timing.median if r.timing else None
        table.add_row(
            escape(f"{r.candidate.variant.name} {short_config(r.candidate.config.to_json())}"),
            r.candidate.variant.path,
            _us(median),
            f"{r.timing.mad:.2f}" if r.timing else "",
            f"{baseline / median:.2f}x" if baseline and median else "",
            f"{r.check.relative_error:.1e}" if r.check.relative_error is not None else "",
            r.check.status if r.check.status == "ok" else escape(f"{r.check.status}: {r.check.reason[:60]}"),
        )
    return table


def survey_json(problem: Problem, device: DeviceInfo, results: Sequence[Result], library: str | None) -> dict[str, Any]:
    baseline = _median_of(results, library)
    return {
        "problem": {f: getattr(problem, f) for f in problem.__dataclass_fields__},
        "device": device.key,
        "library": library,
        "results": [
            {
                "variant": r.candidate.variant.name,
                "path": r.candidate.variant.path,
                "config": json.loads(r.candidate.config.to_json()),
                "status": r.check.status,
                "reason": r.check.reason,
                "median_us": r.timing.median if r.timing else None,
                "mad_us": r.timing.mad if r.timing else None,
                "speedup_over_library": baseline / r.timing.median if baseline and r.timing else None,
                "relative_error": r.check.relative_error,
                "max_error": r.check.max_error,
            }
            for r in results
        ],
    }


def _median_of(results: Sequence[Result], variant: str | None) -> float | None:
    medians = [r.timing.median for r in results if r.timing and r.candidate.variant.name == variant]
    return min(medians) if medians else None


def plan(
    problem: Problem, chosen: Sequence[Candidate], registry: Registry, device: DeviceInfo, effort: str
) -> dict[str, Any]:
    """What a tuning of some effort would try, by the cost model's order, how much it leaves out and why, and why
    variants, or some of their configs, cannot serve."""
    tried = set(chosen)
    tiles = {c.tile for c in chosen} if effort == "quick" else set()  # of which quick tries a few only
    left = [c for c in registry.candidates(problem, device) if c not in tried]
    known = {n: (v, v.unmet(problem, device)) for n, v in registry.variants.items() if v.kind == device.kind}
    refused = {n: v.space.refused(problem, device) for n, (v, unmet) in known.items() if not unmet}
    return {
        "problem": str(problem),
        "candidates": [
            {
                "variant": c.variant.name,
                "config": json.loads(c.config.to_json()),
                "predicted_us": round(predict(c, problem, device).total * 1e6, 1),
            }
            for c in chosen
        ],
        "slower_by_the_model": dict(Counter(c.variant.name for c in left if c.tile not in tiles)),
        "of_tiles_that_are_tried": dict(Counter(c.variant.name for c in left if c.tile in tiles)),
        "not_legal": {n: dict(counts.most_common()) for n, counts in refused.items() if counts},
        "cannot_serve": {n: unmet for n, (_, unmet) in known.items() if unmet},
    }


def plan_table(content: dict[str, Any]) -> Table:
    def counts(found: dict[str, int]) -> str:
        return ", ".join(f"{count} of {n}" for n, count in found.items())

    reasons = {
        "slower by the model": counts(content["slower_by_the_model"]),
        "more of tiles that are tried": counts(content["of_tiles_that_are_tried"]),
        "cannot serve": "; ".join(f"{n} needs {', '.join(why)}" for n, why in content["cannot_serve"].items()),
    }
    notes = [f"{reason}: {what}" for reason, what in reasons.items() if what]
    for name, found in content["not_legal"].items():
        notes.append(f"{name} needs " + ", ".join(f"{message} ({count} do not)" for message, count in found.items()))
    caption = escape("\n".join(notes))
    table = Table(title=content["problem"], caption=caption, title_justify="left", caption_justify="left")
    table.add_column("candidate")
    table.add_column("predicted us", justify="right")
    for row in content["candidates"]:
        name = f"{row['variant']} {short_config(json.dumps(row['config']))}"
        table.add_row(escape(name), _us(row["predicted_us"]))
    return table


def decisions(layers: Layers, registry: Registry, device_key: str | None = None) -> list[dict[str, Any]]:
    """Every decision in every layer with the leader's time and the gain over the best of the other path."""
    rows = []
    for layer, store in layers:
        for decision in store.all_of(DecisionRecord, device_key):
            leader = store.measurement(decision.leader)
            if leader is not None:
                rows.append(_decision_row(layer, store, decision, leader, registry))
    return rows


def _decision_row(
    layer: str, store: TuningStore, decision: DecisionRecord, leader: MeasurementRecord, registry: Registry
) -> dict[str, Any]:
    variants = registry.variants
    known = variants.get(leader.variant)
    others = [store.measurement(i) for i in decision.finalists]
    other_path = [
        r.median_us
        for r in others
        if r and r.median_us and known and r.variant in variants and variants[r.variant].path != known.path
    ]
    return {
        "layer": layer,
        "device": decision.device_key,
        "m": decision.m,
        "n": decision.n,
        "k": decision.k,
        "dtype": decision.dtype,
        "layout": decision.layout,
        "problem": str(decision.problem),
        "regime": decision.regime,
        "ties": len(decision.ties),
        "complete": decision.complete,
        "variant": leader.variant,
        "path": known.path if known else "",
        "config": json.loads(leader.config),
        "median_us": leader.median_us,
        "mad_us": leader.mad_us,
        "gain_over_other_path": min(other_path) / leader.median_us if other_path and leader.median_us else None,
        "relative_error": leader.relative_error,
        "stale": known is None or known.digest != leader.digest,
        "decided_at": decision.decided_at,
    }


def decisions_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table()
    for name in ("problem", "candidate", "median us", "mad", "other path", "rel. error", "from", "note"):
        table.add_column(name, justify="right" if name in ("median us", "mad", "other path", "rel. error") else "left")
    for row in rows:
        gain = row["gain_over_other_path"]
        table.add_row(
            row["problem"],
            escape(f"{row['variant']} {short_config(json.dumps(row['config']))}"),
            _us(row["median_us"]),
            f"{row['mad_us']:.2f}" if row["mad_us"] is not None else "",
            f"{gain:.2f}x" if gain else "",
            f"{row['relative_error']:.1e}" if row["relative_error"] is not None else "",
            escape(row["layer"]),
            "stale: the kernel has changed" if row["stale"] else "",
        )
    return table


def measurements_table(records: Sequence[MeasurementRecord]) -> Table:
    table = Table("problem", "candidate", "stage", "status", "median us", "rel. error", "reason")
    for r in records:
        name = f"{r.variant} {short_config(r.config)}"
        error = "" if r.relative_error is None else f"{r.relative_error:.1e}"
        first_line = r.reason.partition("\n")[0]
        table.add_row(str(r.problem), escape(name), r.stage, r.status, _us(r.median_us), error, escape(first_line))
    return table


def explanation_json(explanation: Explanation) -> dict[str, Any]:
    s = explanation.selection
    return {
        "problem": {f: getattr(s.problem, f) for f in s.problem.__dataclass_fields__},
        "device": s.device.key,
        "variant": s.candidate.variant.name,
        "path": s.candidate.variant.path,
        "config": json.loads(s.candidate.config.to_json()),
        "origin": s.origin.value,
        "reason": s.reason,
        "layer": s.layer,
        "median_us": s.median_us,
        "gain_over_other_path": explanation.gain,
        "distance": explanation.distance,
        "expected_regret": explanation.expected_regret,
        "ties": [r.id for r in explanation.ties],
        "uses": [{**u._asdict(), "candidate": str(u.candidate)} for u in explanation.uses],
        "verdict": explanation.verdict,
        "differences": [d._asdict() for d in explanation.differences],
        "alternatives": [
            {"variant": r.variant, "config": json.loads(r.config), "median_us": r.median_us}
            for r in explanation.alternatives
        ],
    }
