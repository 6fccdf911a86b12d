"""The progress bar of a tuning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar

from autodispatch.problem import Problem
from autodispatch.tuner import Progress


@contextmanager
def progress_bar(console: Console, quiet: bool = False) -> Iterator[Callable[[Progress], None] | None]:
    """A bar of the candidates of the current problem, with the best so far and the time left, on a terminal."""
    if quiet:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[best]}"),
        TextColumn("{task.fields[candidate]}", markup=False),
    )
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[Problem, TaskID] = {}
        best: dict[Problem, float] = {}

        def listener(progress: Progress) -> None:
            problem = progress.problem
            if problem not in tasks:  # a bar for each of those that are tuned side by side
                tasks[problem] = bar.add_task("", total=1, best="", candidate="")
            median = progress.record.median_us if progress.record else None
            if median is not None:
                best[problem] = min(median, best.get(problem, median))
            text = f"best {best[problem]:.1f} us" if problem in best else ""
            bar.update(
                tasks[problem],
                description=f"{problem} {progress.stage}",
                completed=progress.done,
                total=progress.total,
                best=text,
                candidate=str(progress.candidate or ""),
            )
            if progress.stage == "finals" and progress.done == progress.total:
                bar.remove_task(tasks.pop(problem))

        yield listener
