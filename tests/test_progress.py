"""The progress bar: what a user sees of a tuning, on a terminal and elsewhere."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from autodispatch.progress import progress_bar
from autodispatch.tuner import Progress
from autodispatch.variants import Candidate
from tests.fakes import FakeConfig, FakeVariant
from tests.stored import measurement
from tests.tuning import PROBLEM

FIRST, SECOND = (Candidate(FakeVariant(name), FakeConfig(10)) for name in ("first", "second"))


def console(*, is_terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=is_terminal, width=200, color_system=None)


def written(to: Console) -> str:
    assert isinstance(to.file, io.StringIO)
    return to.file.getvalue()


def test_a_terminal_shows_problem_candidate_best_so_far_and_how_far_it_is() -> None:
    terminal = console(is_terminal=True)
    with progress_bar(terminal) as listener:
        assert listener is not None
        listener(Progress(PROBLEM, "screen", 1, 4, FIRST, measurement(PROBLEM, 12.5)))
        listener(Progress(PROBLEM, "screen", 2, 4, FIRST, measurement(PROBLEM, 11.5)))
        listener(Progress(PROBLEM, "screen", 3, 4, SECOND, measurement(PROBLEM, 19.0)))
        end = time.monotonic() + 30
        while "second" not in written(terminal) and time.monotonic() < end:
            time.sleep(0.02)  # it is drawn ten times a second
        line = written(terminal).split("\n")[-1]
    assert f"{PROBLEM} screen" in line and "3/4" in line
    assert "best 11.5 us" in line and "second" in line
    assert line.count(":") >= 4  # time spent and time left


@pytest.mark.parametrize(("is_terminal", "quiet"), [(False, False), (True, True)])
def test_nothing_is_drawn_elsewhere_or_where_it_was_not_wanted(is_terminal: bool, quiet: bool) -> None:
    other = console(is_terminal=is_terminal)
    with progress_bar(other, quiet) as listener:
        if listener is not None:
            listener(Progress(PROBLEM, "screen", 1, 4, FIRST, measurement(PROBLEM, 12.5)))
            time.sleep(0.25)
    assert quiet == (listener is None)
    assert not written(other).strip()
