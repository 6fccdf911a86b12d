"""The progress bar of a tuning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
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
        task = bar.add_task("", total=1, best="", candidate="")
        current: Problem | None = None
        best: dict[Problem, float] = {}

        def listener(progress: Progress) -> None:
            nonlocal current
            if progress.problem != current:  # another pace
                current = progress.problem
                bar.reset(task)
            median = progress.record.median_us if progress.record else None
            if median is not None:
                best[progress.problem] = min(median, best.get(progress.problem, median))
            text = f"best {best[progress.problem]:.1f} us" if progress.problem in best else ""
            description = f"{progress.problem} {progress.stage}"
            bar.update(task, description=description, completed=progress.done, total=progress.total, best=text)
            if progress.candidate is not None:
                bar.update(task, candidate=str(progress.candidate))

        yield listener
