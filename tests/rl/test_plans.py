"""What a run's plan leaves open: in how many bits block scales travel."""

from __future__ import annotations

import pytest

from tracefp4 import config as settings
from tracefp4.errors import ConfigError
from tracefp4.rl.plans import resolved


@pytest.mark.parametrize(
    ("overrides", "plan"),
    [
        ((), "r1-all+mid/s2"),
        (("plan=r1-all",), "r1-all/s3"),
        (("plan=c1-all+mid",), "c1-all+mid/s2"),
        (("plan=r1-half+mid",), "r1-half+mid/s8"),
        (("plan=r1-all:kv",), "r1-all:kv/s8"),
        (("plan=r1-all:experts[0-1]+kv",), "r1-all:experts[0-1]+kv/s8"),
        # Its trainer rounds K and V alone: of a plan of every site these are left, and everything it rounds is guided.
        (("method=trace_quads",), "r1-all+mid/s3"),
        (("method=trace_quads", "plan=r1-all:kv"), "r1-all:kv/s3"),
        (("method=trace_quads", "plan=r1-l2:kv"), "r1-l2:kv/s8"),
        # Trainer and engine drift apart, or nobody has measured whether they do.
        (("train.minibatches=2",), "r1-all+mid/s8"),
        (("train.lag=1",), "r1-all+mid/s8"),
        (("train.max_lag=1",), "r1-all+mid/s8"),
        (("engine=sglang",), "r1-all+mid/s8"),
        (("engine=vllm", "plan=r1-all"), "r1-all/s8"),
        # Who says it has it.
        (("plan=r1-all+mid/s8",), "r1-all+mid/s8"),
        (("plan=r1-all/s2", "train.minibatches=2"), "r1-all/s2"),
        (("engine=sglang", "plan=r1-all+mid/s3"), "r1-all+mid/s3"),
        # Nothing is open.
        (("plan=auto:4096",), "auto:4096"),
        (("method=qat",), "r1-all+mid"),
        (("plan=none",), "none"),
    ],
)
def test_scales_take_what_was_measured_to_be_enough(overrides: tuple[str, ...], plan: str) -> None:
    found = resolved(settings.load(None, overrides))
    assert found.plan == plan and resolved(found) == found


def test_a_plan_that_a_method_cannot_follow_is_refused() -> None:
    with pytest.raises(ConfigError, match="has none of them"):
        resolved(settings.load(None, ("method=trace_quads", "plan=r1-all:experts")))
    with pytest.raises(ConfigError, match="did you mean"):
        resolved(settings.load(None, ("plan=r1-al",)))
