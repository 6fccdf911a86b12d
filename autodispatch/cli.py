"""The command line. Exit codes: 0 done, 1 failed with a message, 2 wrong usage, 130 interrupted."""

from __future__ import annotations

import itertools
import json
import logging
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.logging import RichHandler
from rich.markup import escape
from rich.table import Table

from autodispatch import heuristics, maintenance, report, studies
from autodispatch.benchmark import workbench
from autodispatch.compiler import nvrtc_file
from autodispatch.device import cuda_devices, environment
from autodispatch.dispatcher import Dispatcher
from autodispatch.errors import AutodispatchError, VerificationError
from autodispatch.fleet import in_order_of_need, tune_side_by_side
from autodispatch.layers import Layers
from autodispatch.maintenance import console, messages
from autodispatch.options import (
    Activation,
    Alignment,
    Database,
    Device,
    Dtypes,
    Effort,
    HfConfig,
    Json,
    K,
    Layouts,
    Math,
    Ms,
    N,
    Precision,
    Shapes,
    ShapesFile,
    device_of,
    problems_of,
    settings_of,
)
from autodispatch.problem import Problem
from autodispatch.progress import progress_bar
from autodispatch.records import MeasurementRecord
from autodispatch.reference import array_module, compare, decode, make_inputs, reference
from autodispatch.runner import LocalRunner, Runner
from autodispatch.store import TuningStore
from autodispatch.tuner import Tuner
from autodispatch.variants import Registry
from autodispatch.worker import runner_for

app = typer.Typer(
    name="autodispatch",
    help="SiLU(a @ b1) * (a @ b2) on NVIDIA GPUs: tune it, see what was picked, carry the results.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(maintenance.app)
app.add_typer(studies.app)


@app.command()
def demo(device: Device = "auto", database: Database = None) -> None:
    """Tunes a few shapes, dispatches them, checks the results and shows what was picked, and why."""
    chosen, settings = device_of(device), settings_of(database)
    if chosen.kind == "cuda":
        problems = [Problem(m, 8960, 1536, "bfloat16") for m in (16, 256, 2048)]
    else:
        problems = [Problem(m, 2048, 512, "float32") for m in (1, 64, 512)]
    console.print(f"Device: {chosen.name} ({chosen.key})")
    store = TuningStore(settings.database)  # an error here, rather than results that are lost
    if _tune(store, [runner_for(chosen)], problems, "quick", None, quiet=False)[0]:
        raise typer.Exit(1)
    store.close()
    dispatcher = Dispatcher(settings)
    for problem in problems:
        inputs = make_inputs(problem, chosen, seed=7)
        out = dispatcher.run(inputs.a, inputs.b1, inputs.b2)
        expected, tolerance = reference(inputs.a, inputs.b1, inputs.b2, problem)
        check = compare(array_module(chosen), decode(out), expected, tolerance, problem.dtype)
        if check.status != "ok":
            raise VerificationError(f"{problem}: {check.reason}")
        explanation = dispatcher.explain(inputs.a, inputs.b1, inputs.b2)
        console.print(str(explanation), highlight=False, markup=False)
        console.print(f"  right to a relative error of {check.relative_error:.1e} against float64", highlight=False)
        if explanation.selection.median_us:
            console.print(f"  {report.rate(problem, explanation.selection.median_us)}", highlight=False)
    console.print(f"Stored in {settings.database}", highlight=False, markup=False, soft_wrap=True)
    dispatcher.close()


@app.command()
def info(device: Device = "auto", as_json: Json = False) -> None:
    """The device, what tuning records must match, the versions in use, and which variants can be built."""
    chosen = device_of(device)
    versions = environment(chosen)
    if chosen.kind == "cuda":
        versions["nvrtc_file"] = nvrtc_file()
    registry = Registry()
    variants: dict[str, dict[str, str]] = {}
    for name, variant in registry.variants.items():
        if variant.kind == chosen.kind:
            variants[name] = {}
            for dtype in ("float32", "float16", "bfloat16"):
                unmet = variant.unmet(Problem(4096, 4096, 4096, dtype), chosen)
                variants[name][dtype] = f"needs {'; '.join(unmet)}" if unmet else "yes"
    if as_json:
        content = {"device": asdict(chosen), "key": chosen.key, "environment": versions, "variants": variants}
        console.print_json(json.dumps(content))
        return
    for title, rows in (("device", {**asdict(chosen), "key": chosen.key}), ("environment", versions)):
        table = Table(title=title, show_header=False, title_justify="left")
        for key, value in rows.items():
            table.add_row(key, escape(str(value)))
        console.print(table)
    table = Table("variant", "path", "float32", "float16", "bfloat16", title="variants", title_justify="left")
    for name, support in variants.items():
        table.add_row(name, registry.variants[name].path, *support.values())
    console.print(table)


@app.command()
def tune(
    shape: Shapes = None,
    shapes_file: ShapesFile = None,
    ms: Ms = None,
    n: N = None,
    k: K = None,
    hf_config: HfConfig = None,
    dtype: Dtypes = None,
    layout: Layouts = None,
    activation: Activation = None,
    math: Math = "exact",
    precision: Precision = "ieee",
    alignment: Alignment = None,
    effort: Effort = "quick",
    budget: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds for all that is not tuned yet; then no further launch is timed."),
    ] = None,
    misses: Annotated[bool, typer.Option("--misses", help="Tune what calls asked for and did not find.")] = False,
    device: Annotated[
        str, typer.Option("--device", help="auto, cpu, cuda:INDEX, or all: every GPU, side by side.")
    ] = "auto",
    database: Database = None,
    isolate: Annotated[
        bool, typer.Option("--isolate/--no-isolate", help="Try candidates in a process of their own, or in this one.")
    ] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be tried, and measure nothing.")] = False,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar and no table.")] = False,
) -> None:
    """Measures the candidates for each shape and stores what is fastest. What is finished survives an interruption."""
    if effort not in ("quick", "full"):
        raise typer.BadParameter(f"must be quick or full (got {effort!r})", param_hint="--effort")
    chosen = device_of("auto" if device == "all" else device)
    store = TuningStore(settings_of(database).database)  # an error here, rather than results that are lost
    every = cuda_devices() if device == "all" else [chosen]
    if misses:
        if shape or shapes_file or ms or hf_config:
            raise typer.BadParameter("the shapes are those that were missed", param_hint="--misses")
        problems = list(dict.fromkeys(p for d in every for p in store.missed_problems(d.key)))
    else:
        problems = problems_of(
            chosen, shape, shapes_file, ms, n, k, hf_config, dtype, layout, activation, math, precision, alignment
        )
    if dry_run:
        subject = Tuner(store, runner_for(chosen, isolate))
        plans = [report.plan(p, subject.shortlist(p, effort), Registry(), chosen, effort) for p in problems]
        if as_json:
            console.print_json(json.dumps(plans))
        for plan in [] if as_json else plans:
            console.print(report.plan_table(plan))
        return
    runners = [runner_for(d, isolate) for d in every]
    failed, left = _tune(store, runners, problems, effort, budget, quiet=quiet or as_json)
    if as_json:
        wanted = {(d.key, str(p)) for d in every for p in problems if p not in failed and (d.key, p) not in left}
        rows = report.decisions(Layers([("user", store)]), Registry())
        console.print_json(json.dumps([row for row in rows if (row["device"], row["problem"]) in wanted]))
    store.close()
    if failed:
        raise typer.Exit(1)


@app.command("list")
def list_(
    database: Database = None,
    device: Annotated[str | None, typer.Option("--device", help="Only records of this device key.")] = None,
    every: Annotated[bool, typer.Option("--measurements", help="Every measurement of your own database.")] = False,
    as_json: Json = False,
) -> None:
    """What was decided, in every database that a call would consult."""
    layers = Dispatcher(settings_of(database)).layers
    if every:
        records: list[MeasurementRecord] = layers.user.measurements(device)
        if as_json:
            console.print_json(json.dumps([r.model_dump() for r in records]))
            return
        console.print(report.measurements_table(records))
        return
    rows = report.decisions(layers, Registry(), device)
    if as_json:
        console.print_json(json.dumps(rows))
        return
    for key in dict.fromkeys(row["device"] for row in rows):
        console.print(f"[bold]{key}[/bold]", highlight=False)
        console.print(report.decisions_table([row for row in rows if row["device"] == key]))
    if not rows:
        console.print("Nothing is tuned yet; run: autodispatch tune M,N,K")


@app.command()
def explain(
    shape: Shapes = None,
    shapes_file: ShapesFile = None,
    ms: Ms = None,
    n: N = None,
    k: K = None,
    hf_config: HfConfig = None,
    dtype: Dtypes = None,
    layout: Layouts = None,
    activation: Activation = None,
    math: Math = "exact",
    precision: Precision = "ieee",
    alignment: Alignment = None,
    device: Device = "auto",
    database: Database = None,
    as_json: Json = False,
) -> None:
    """What a call of each shape would run, where the choice comes from, and why. Measures nothing."""
    chosen = device_of(device)
    problems = problems_of(
        chosen, shape, shapes_file, ms, n, k, hf_config, dtype, layout, activation, math, precision, alignment
    )
    dispatcher = Dispatcher(settings_of(database))
    found = [dispatcher.explain_problem(p, chosen) for p in problems]
    if as_json:
        console.print_json(json.dumps([report.explanation_json(e) for e in found]))
        return
    for explanation in found:
        console.print(str(explanation), highlight=False, markup=False, soft_wrap=True)


@app.command()
def bench(
    shape: Shapes = None,
    shapes_file: ShapesFile = None,
    ms: Ms = None,
    n: N = None,
    k: K = None,
    hf_config: HfConfig = None,
    dtype: Dtypes = None,
    layout: Layouts = None,
    activation: Activation = None,
    math: Math = "exact",
    precision: Precision = "ieee",
    alignment: Alignment = None,
    variant: Annotated[
        list[str] | None, typer.Option("--variant", help="Only this one and the library; may be repeated.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Every legal candidate, not only the likely winners.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 10,
    device: Device = "auto",
    output: Annotated[Path | None, typer.Option("--output", help="Write the results as JSON to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Times the likely candidates, or all, and the library in one interleaved run. Stores nothing."""
    chosen = device_of(device)
    problems = problems_of(
        chosen, shape, shapes_file, ms, n, k, hf_config, dtype, layout, activation, math, precision, alignment
    )
    if output is not None and not output.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {output.parent}", param_hint="--output")
    registry = Registry()
    if variant:
        unknown = sorted(set(variant) - set(registry.variants))
        if unknown:
            known = ", ".join(registry.variants)
            raise typer.BadParameter(f"must be one of {known} (got {', '.join(unknown)})", param_hint="--variant")
        registry = Registry({n: v for n, v in registry.variants.items() if n in variant or v.is_library})
    tuner = Tuner(TuningStore(), LocalRunner(workbench(chosen)), registry)
    found: list[dict[str, Any]] = []
    for problem in problems:
        library = registry.library(problem, chosen)
        name = library.variant.name if library else None
        every = heuristics.rank(registry.candidates(problem, chosen), problem, chosen) if full else None
        results = tuner.survey(problem, every, rounds)
        found.append(report.survey_json(problem, chosen, results, name))
        if not as_json:
            console.print(report.survey_table(problem, chosen, results, name))
    content = {"environment": environment(chosen), "command": _command(), "surveys": found}
    if as_json:
        console.print_json(json.dumps(content))
    if output is not None:
        output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    wrong = [r for s in found for r in s["results"] if r["status"] in ("wrong_result", "out_of_bounds")]
    if wrong:
        raise VerificationError(f"{len(wrong)} candidates gave a wrong result; the first: {wrong[0]['variant']}")


def _tune(
    store: TuningStore,
    runners: Sequence[Runner],
    problems: list[Problem],
    effort: str,
    budget: float | None,
    *,
    quiet: bool,
) -> tuple[list[Problem], list[tuple[str, Problem]]]:
    """Tunes the problems on each kind of device with a progress bar, with a budget only those not tuned yet.

    Returns those that failed, each with a message, and those that the budget left, with their device's key.
    """
    deadline = time.monotonic() + (float("inf") if budget is None else budget)
    failed: list[Problem] = []
    left: list[tuple[str, Problem]] = []
    begun: set[str] = set()  # device keys
    done = itertools.count(1)
    total = len(problems) * len({r.device.key for r in runners})

    def tune_one(tuner: Tuner, problem: Problem) -> None:
        start, key = time.monotonic(), tuner.device.key
        if start >= deadline and key in begun:
            left.append((key, problem))
            return
        try:
            decision = tuner.tune(problem, effort=effort, budget_s=deadline - start)
        except AutodispatchError as cause:
            failed.append(problem)
            messages.print(f"{problem}: {cause}", style="red", highlight=False, markup=False)
            return
        begun.add(key)
        leader = store.measurement(decision.leader)
        if leader is not None and leader.median_us is not None and not quiet:
            name = f"{leader.variant} {report.short_config(leader.config)}"
            rate = report.rate(problem, leader.median_us)
            line = f"[{next(done)}/{total}] {problem}: {name}, {leader.median_us:.1f} us, {rate}"
            parts = ", ".join(f"{step} {seconds:.1f}" for step, seconds in tuner.spent.items())
            took = f"(tuned in {time.monotonic() - start:.1f} s: {parts})"
            messages.print(f"{line} {took}", highlight=False, markup=False, soft_wrap=True)

    with ExitStack() as stack:
        listener = stack.enter_context(progress_bar(messages, quiet))
        tuners = [Tuner(store, runner, command=_command(), listener=listener) for runner in runners]
        for tuner in tuners:
            stack.callback(tuner.close)
        try:
            todo = problems if budget is None else in_order_of_need(tuners, problems, effort)
            tune_side_by_side(tuners, todo, tune_one)
        except KeyboardInterrupt:
            messages.print("interrupted; what was finished is stored")
            raise typer.Exit(130) from None
    if left:
        messages.print(f"the budget is used up, {len(left)} of {total} problems are left")
    return failed, left


def _command() -> str:
    return shlex.join(["autodispatch", *sys.argv[1:]])


def main() -> None:
    """The entry point of the `autodispatch` script."""
    handler = RichHandler(console=messages, show_time=False, show_path=False)
    logging.getLogger("autodispatch").addHandler(handler)
    try:
        app()
    except AutodispatchError as cause:
        messages.print(f"[red]error:[/red] {type(cause).__name__}:", end=" ")
        messages.print(str(cause), highlight=False, markup=False, soft_wrap=True)
        raise SystemExit(1) from None
    except OSError as cause:
        messages.print(f"error: {cause}", style="red", highlight=False, markup=False, soft_wrap=True)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
