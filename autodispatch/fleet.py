"""Several devices tuned side by side, each by a tuner of its own; equal ones share the problems out among them."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from autodispatch.problem import Problem
from autodispatch.tuner import Tuner


def tune_side_by_side(
    tuners: Sequence[Tuner], problems: Iterable[Problem], tune_one: Callable[[Tuner, Problem], None]
) -> None:
    """Calls `tune_one` for every problem and every kind of device, in one thread per tuner; alone, in this one.

    Devices of one key are equal: a problem is tuned on one of them. What `tune_one` raises ends all, and closes the
    tuners.
    """
    todo: dict[str, queue.SimpleQueue[Problem]] = {t.device.key: queue.SimpleQueue() for t in tuners}
    for problem in problems:
        for waiting in todo.values():
            waiting.put(problem)

    def work(tuner: Tuner) -> None:
        waiting = todo[tuner.device.key]
        while True:
            try:
                problem = waiting.get_nowait()
            except queue.Empty:
                return
            tune_one(tuner, problem)

    if len(tuners) == 1:
        work(tuners[0])
        return
    with ThreadPoolExecutor(len(tuners)) as pool:
        running = [pool.submit(work, tuner) for tuner in tuners]
        try:
            for future in running:
                future.result()
        except BaseException:
            for waiting in todo.values():
                while not waiting.empty():
                    waiting.get_nowait()
            for tuner in tuners:
                tuner.close()
            raise
