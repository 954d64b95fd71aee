"""Works side by side: results in order, errors raised by the caller."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from tracefp4.errors import GuidanceCorrupt
from tracefp4.guidance.workers import side_by_side


@pytest.mark.parametrize("threads", [None, 1, 2, 5, 40])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 100])
def test_results_are_those_of_one_after_the_other(threads: int | None, count: int) -> None:
    assert side_by_side([partial(pow, n, 2) for n in range(count)], threads) == [n * n for n in range(count)]


def test_works_run_at_the_same_time() -> None:
    meeting = threading.Barrier(3, timeout=20)
    assert sorted(side_by_side([meeting.wait] * 3, 3)) == [0, 1, 2]


@pytest.mark.parametrize("threads", [1, 3])
def test_the_first_error_in_order_reaches_the_caller(threads: int) -> None:
    done = []

    def work(number: int) -> int:
        if number in (5, 30):
            raise GuidanceCorrupt(f"frame {number}")
        done.append(number)
        return number

    with pytest.raises(GuidanceCorrupt, match="frame 5"):
        side_by_side([partial(work, n) for n in range(60)], threads)
    assert set(range(5)) <= set(done)
