"""The progress bar of a tuning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from autodispatch.problem import Problem
from autodispatch.tuner import Progress


@contextmanager
def progress_bar(console: Console, quiet: bool = False) -> Iterator[Callable[[Progress], None] | None]:
    """A bar of the candidates of the current problem, on a terminal."""
    if quiet:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[best]}"),
    )
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=1, best="")
        best: dict[Problem, float] = {}

        def listener(progress: Progress) -> None:
            median = progress.record.median_us if progress.record else None
            if median is not None:
                best[progress.problem] = min(median, best.get(progress.problem, median))
            text = f"best {best[progress.problem]:.1f} us" if progress.problem in best else ""
            description = f"{progress.problem} {progress.stage}"
            bar.update(task, description=description, completed=progress.done, total=progress.total, best=text)

        yield listener
