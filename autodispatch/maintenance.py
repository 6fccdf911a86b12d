"""The commands that look after databases and the installation: export, import, verify, prune, clear, doctor."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from autodispatch import doctor as examination
from autodispatch import exchange, locations, pruning, shapes, verification
from autodispatch.dispatcher import Dispatcher
from autodispatch.options import Database, Device, Dtypes, Json, Layouts, device_of, settings_of
from autodispatch.problem import ACTIVATIONS, ITEM_BYTES, LAYOUTS, check_choice
from autodispatch.store import TuningStore
from autodispatch.tuner import Tuner
from autodispatch.variants import Registry
from autodispatch.worker import runner_for

app = typer.Typer()
console = Console(width=None if sys.stdout.isatty() else 200)  # a file or pipe gets whole lines
messages = Console(stderr=True)


@app.command("export")
def export_(
    path: Annotated[str, typer.Argument(help="A path or URL; .jsonl for JSON Lines, .db for SQLite.")],
    device: Annotated[str | None, typer.Option("--device", help="Only records of this device key.")] = None,
    ms: Annotated[str | None, typer.Option("--m", help="Only records of these M, as 1,16,128.")] = None,
    n: Annotated[int | None, typer.Option("--n", min=1, help="Only records of this N.")] = None,
    k: Annotated[int | None, typer.Option("--k", min=1, help="Only records of this K.")] = None,
    hf_config: Annotated[Path | None, typer.Option("--hf-config", help="Only records of this model's N and K.")] = None,
    dtype: Dtypes = None,
    layout: Layouts = None,
    winners_only: Annotated[bool, typer.Option("--winners-only", help="Only what decisions refer to.")] = False,
    database: Database = None,
) -> None:
    """Writes the user's database, or a part of it, to a file that another machine can import."""
    name = locations.name_of(path)
    if not name.endswith((".jsonl", ".db")):
        raise typer.BadParameter(f"must end in .jsonl or .db (got {name!r})", param_hint="PATH")
    try:
        if hf_config is not None:
            n, k, _ = shapes.from_hf_config(hf_config, ACTIVATIONS[0])
        sizes = shapes.parse_sizes(ms) if ms else ()
        for name_of_choice, values, known in (("dtype", dtype, ITEM_BYTES), ("layout", layout, LAYOUTS)):
            for value in values or ():
                check_choice(name_of_choice, value, tuple(known))
    except ValueError as cause:
        raise typer.BadParameter(str(cause)) from cause
    chosen = exchange.Filter(device, sizes, n, k, tuple(dtype or ()), tuple(layout or ()), winners_only)
    write = exchange.export_sqlite if name.endswith(".db") else exchange.export_jsonl
    store = existing_store(database)
    with locations.writable(path) as file:
        if store.path is not None and file.exists() and file.samefile(store.path):
            raise typer.BadParameter("must not be the database that is exported", param_hint="PATH")
        count = write(store, file, chosen)
    console.print(f"{count} records written to {path}", highlight=False, markup=False, soft_wrap=True)


@app.command("import")
def import_(
    path: Annotated[str, typer.Argument(help="A path or URL of what export wrote.")],
    replace_decisions: Annotated[
        bool, typer.Option("--replace", help="Let imported decisions take the place of your own.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would change, and change nothing.")] = False,
    database: Database = None,
) -> None:
    """Merges a file into the user's database and says what was added, superseded, kept and rejected."""
    own = settings_of(database).database
    store = TuningStore(own if own.is_file() or not dry_run else None)
    with locations.readable(path, exchange.MAX_FILE_BYTES) as file:
        outcome = exchange.import_file(store, file, replace_decisions=replace_decisions, dry_run=dry_run)
    console.print(
        f"{'would be added' if dry_run else 'added'}: {_counts(outcome.added)}; superseded: {outcome.superseded}; "
        f"kept: {outcome.kept}; rejected: {len(outcome.rejected)}",
        highlight=False,
    )
    for reason in outcome.rejected[:20]:
        messages.print(f"rejected: {reason}", highlight=False, markup=False)


@app.command()
def verify(
    count: Annotated[int, typer.Option("--sample", min=1, help="At most so many, spread over all.")] = 10,
    device: Device = "auto",
    database: Database = None,
    isolate: Annotated[
        bool, typer.Option("--isolate/--no-isolate", help="Try candidates in a process of their own, or in this one.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Measures decisions of other machines again on this one, and keeps what holds. Exit code 1 if some does not."""
    chosen, registry = device_of(device), Registry()
    layers = Dispatcher(settings_of(database)).layers
    found = verification.foreign_decisions(layers, chosen, registry)
    tuner = Tuner(layers.user, runner_for(chosen, isolate), registry, command="autodispatch verify")
    with closing(tuner):
        verdicts = [verification.verify(tuner, layers.user, f, registry) for f in verification.sample(found, count)]
    rows = [
        {
            "problem": str(v.foreign.problem),
            "layer": v.foreign.layer,
            "theirs": str(v.foreign.candidates[0]),
            "here": str(v.pick),
            "slowdown": v.slowdown,
            "holds": v.holds,
        }
        for v in verdicts
    ]
    if as_json:
        console.print_json(json.dumps(rows))
    else:
        table = Table("problem", "from", "theirs", "here", "theirs / here", "")
        for v, row in zip(verdicts, rows, strict=True):
            ratio = f"{v.slowdown:.2f}x" if v.slowdown is not None else ""
            cells = (str(row[name]) for name in ("problem", "layer", "theirs", "here"))
            table.add_row(*(escape(c) for c in cells), ratio, "holds" if v.holds else "replaced")
        console.print(table)
    agreed = sum(v.holds for v in verdicts)
    messages.print(f"{agreed} of {len(verdicts)} hold, of {len(found)} that were not measured here", highlight=False)
    if agreed < len(verdicts):
        raise typer.Exit(1)


@app.command()
def prune(
    older_than: Annotated[
        float | None, typer.Option("--older-than", min=0, metavar="DAYS", help="Measured before so many days.")
    ] = None,
    stale: Annotated[bool, typer.Option("--stale", help="Of kernels that have changed since.")] = False,
    has_failed: Annotated[bool, typer.Option("--failed", help="Failures, which are then tried again.")] = False,
    device: Annotated[str | None, typer.Option("--device", help="Of this device key.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go.")] = False,
    database: Database = None,
) -> None:
    """Drops the measurements that meet all criteria given, and the decisions that they lead."""
    criteria = pruning.Criteria(older_than, stale, has_failed, device)
    if criteria.is_empty:
        raise typer.BadParameter("give at least one of --older-than, --stale, --failed, --device")
    store = existing_store(database)
    chosen = pruning.select(store, criteria, Registry())
    if dry_run:
        console.print(f"{len(chosen)} measurements would go", highlight=False)
        return
    console.print(f"dropped: {_counts(pruning.drop(store, chosen))}", highlight=False)


@app.command()
def clear(database: Database = None, yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False) -> None:
    """Empties the user's database."""
    store = existing_store(database)
    if not yes:
        typer.confirm(f"Drop all of {store.path}?", abort=True)
    console.print(f"dropped: {_counts(pruning.clear(store))}", highlight=False)


@app.command()
def doctor(database: Database = None, as_json: Json = False) -> None:
    """What is wrong with this installation, and what mends it. Exit code 1 if something is."""
    found = examination.examine(settings_of(database))
    if as_json:
        console.print_json(json.dumps([asdict(f) for f in found]))
    else:
        table = Table("", "what", "how it is", "what mends it")
        marks = {"ok": "[green]ok[/green]", "warning": "[yellow]warning[/yellow]", "error": "[red]error[/red]"}
        for finding in found:
            table.add_row(marks[finding.status], finding.name, escape(finding.detail), escape(finding.remedy))
        console.print(table)
    if any(f.status == "error" for f in found):
        raise typer.Exit(1)


def _counts(rows: dict[str, int]) -> str:
    return ", ".join(f"{count} {table}" for table, count in rows.items() if count) or "nothing"


def existing_store(database: Path | None) -> TuningStore:
    path = settings_of(database).database
    if not path.is_file():
        raise typer.BadParameter(f"there is no tuning database at {path}", param_hint="--database")
    return TuningStore(path)
