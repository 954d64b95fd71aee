"""What tests of measurements share."""

from __future__ import annotations

import pytest


class Clock:
    """A clock on which nothing takes time but what says so, and a look at it a microsecond."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        """The time, in seconds."""
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    """To be put into the place of ``time``: how busy a machine is must not show in what is measured."""
    return Clock()
