"""The commands that answer a question about dispatching by measuring it: overhead, regret."""

from __future__ import annotations

import json
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from autodispatch import overhead as calls
from autodispatch import regret as losses
from autodispatch.device import environment
from autodispatch.maintenance import console, messages
from autodispatch.options import Device, Dtypes, Effort, Json, Layouts, device_of
from autodispatch.shapes import parse_sizes, problems
from autodispatch.worker import runner_for

app = typer.Typer()


@app.command()
def overhead(device: Device = "auto", as_json: Json = False) -> None:
    """The CPU time of a call above a bare launch of the same kernel with ready arguments. Needs a GPU."""
    chosen = device_of(device)
    if chosen.kind != "cuda":
        raise typer.BadParameter("must be a GPU, since launches are timed", param_hint="--device")
    found = calls.measure(chosen)
    if as_json:
        console.print_json(json.dumps({"environment": environment(chosen), "ways": [x._asdict() for x in found]}))
        return
    table = Table("call", "us", "above the bare launch", title=chosen.name, title_justify="left")
    for way, call_us, above_us in found:
        table.add_row(way, f"{call_us:.2f}", f"{above_us:.2f}")
    console.print(table)


@app.command()
def regret(
    ms: Annotated[str, typer.Option("--m", help="Values of M that are called untuned, as 2,24,300.")],
    n: Annotated[int, typer.Option("--n", min=1, help="N for all values of M.")],
    k: Annotated[int, typer.Option("--k", min=1, help="K for all values of M.")],
    tuned: Annotated[str, typer.Option("--tuned", help="Values of M that are tuned.")] = "1,16,256,4096",
    dtype: Dtypes = None,
    layout: Layouts = None,
    effort: Effort = "quick",
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """What calls lose where only some M are tuned: the pick raced against what tuning finds. Stores nothing."""
    chosen = device_of(device)
    types = dtype or ["float32" if chosen.kind == "cpu" else "bfloat16"]
    try:
        asked = problems([(m, n, k) for m in parse_sizes(ms)], types, layout or ["kn"])
        known = problems([(m, n, k) for m in parse_sizes(tuned)], types, layout or ["kn"])
    except ValueError as cause:
        raise typer.BadParameter(str(cause)) from cause
    runner = runner_for(chosen)
    table = Table("problem", "pick", "origin", "us", "best us", "regret", title=chosen.name, title_justify="left")
    rows: list[dict[str, Any]] = []
    try:
        for found in losses.measure(runner, known, asked, effort):
            s = found.selection
            cells = (f"{found.pick_us:.1f}", f"{found.best_us:.1f}", f"{found.share:.2%}")
            table.add_row(str(s.problem), str(s.candidate), s.origin.value, *cells)
            messages.print(f"{s.problem}: {found.share:.2%}", highlight=False)
            fields = {"problem": str(s.problem), "pick": str(s.candidate), "origin": s.origin.value}
            rows.append({**fields, "pick_us": found.pick_us, "best_us": found.best_us, "regret": found.share})
    finally:
        runner.close()
    shares = [row["regret"] for row in rows]
    median, high = (float(np.percentile(shares, p)) for p in (50, 95))
    if as_json:
        content = {"environment": environment(chosen), "rows": rows, "median": median, "percentile_95": high}
        console.print_json(json.dumps(content))
        return
    console.print(table)
    console.print(f"median {median:.2%}, 95th percentile {high:.2%}", highlight=False)
