"""What guidance costs: predicted to the byte, and the paper's figures from real frames."""

from __future__ import annotations

import pytest
import torch

from tracefp4.guidance.frame import encode
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.sizes import PARTS, SITE_PARTS, account, by_kind, bytes_per_token, sizes

ROWS = 50


def test_the_paper_s_plan_on_qwen35(make, qwen35) -> None:
    """R-1bit-L20: 7.5 KiB a token of codes and block scales for the experts' input, and 960 bytes for K and V."""
    record = make("r1-l20", qwen35, range(ROWS + 1), num_layers=40, routes=(torch.uint8, 40, 8))
    frame = encode(record)
    kinds = by_kind(frame)
    assert sorted(kinds) == ["experts_in", "k", "v"]
    assert kinds["experts_in"]["codes"] + kinds["experts_in"]["block_scales"] == ROWS * 7680
    assert sum(kinds[kind][part] for kind in ("k", "v") for part in ("codes", "block_scales")) == ROWS * 960
    parts = account(frame)
    assert parts["codes"] == ROWS * (20 * 256 + 5 * 128)
    assert parts["block_scales"] == ROWS * (20 * 128 + 5 * 64)
    assert parts["global_scales"] == ROWS * 20 * 4
    assert parts["checks"] == 0
    assert parts["routes"] == ROWS * 40 * 8
    assert parts["valid"] == -(-ROWS // 8)
    assert parts["header"] < 2000
    assert parts["alignment"] < 64 * 100
    assert parts["total"] == len(frame) == sum(parts[name] for name in PARTS)


def test_whole_codes_everywhere_on_qwen35(make, qwen35) -> None:
    """R-4bit-L40: 45 KiB a token for the experts' input, 5.625 KiB for K and V."""
    kinds = by_kind(encode(make("r4-all/s8", qwen35, range(11), num_layers=40)))
    assert kinds["experts_in"]["codes"] + kinds["experts_in"]["block_scales"] == 10 * 45 * 1024
    assert sum(kinds[kind][part] for kind in ("k", "v") for part in ("codes", "block_scales")) == 10 * 5760


@pytest.mark.parametrize("plan", ["r1-l20", "r1-all+mid/s3", "r2-all:kv/s2", "r4-l1+mid", "c1-all+mid/s2"])
@pytest.mark.parametrize("rows", [0, 1, 17, 64])
def test_sizes_equal_real_frames(make, qwen35, plan: str, rows: int) -> None:
    for routes, version in ((None, 0), ((torch.int16, 40, 8), 70_000)):
        record = make(plan, qwen35, range(rows + 1), num_layers=40, routes=routes, weight_version=version)
        shape = None if routes is None else ("int16", 40, 8)
        told = sizes(Plan.parse(plan), qwen35, rows, num_layers=40, routes=shape, weight_version=version)
        assert told == account(encode(record))
        chosen = Plan.parse(plan).select(qwen35, 40)
        assert told == sizes(Plan.parse(plan), chosen, rows, routes=shape, weight_version=version)


def test_checks_of_codes_are_not_called_codes(make, qwen35) -> None:
    """60 checks of 32 bits a token: the experts' input of 40 layers, K and V of 10."""
    parts = account(encode(make("c1-all/s2", qwen35, range(ROWS + 1), num_layers=40)))
    assert (parts["codes"], parts["code_checks"]) == (0, ROWS * 4 * (40 + 2 * 10))
    bits = account(encode(make("r1-all/s2", qwen35, range(ROWS + 1), num_layers=40)))
    assert bits["code_checks"] == 0 and bits["codes"] > 0 and bits["block_scales"] == parts["block_scales"]


@pytest.mark.parametrize("plan", ["r1-l20", "r1-all+mid/s3", "r3-all/s2", "c1-all+mid/s2"])
def test_bytes_per_token_is_the_growth_of_a_frame(qwen35, plan: str) -> None:
    parsed = Plan.parse(plan)
    few, many = (sizes(parsed, qwen35, rows, num_layers=40) for rows in (1600, 3200))
    grown = sum(many[part] - few[part] for part in SITE_PARTS)
    assert bytes_per_token(parsed, qwen35, 40) == grown / 1600


def test_congruent_scales_cost_what_they_promise(qwen35) -> None:
    whole = bytes_per_token(Plan.parse("r1-all:experts/s8"), qwen35, 40)
    three = bytes_per_token(Plan.parse("r1-all:experts/s3"), qwen35, 40)
    assert whole == 40 * (256 + 128 + 4)
    assert three == 40 * (256 + 48 + 4 + 0.25)
    for bits in (1, 4):
        assert bytes_per_token(Plan.parse(f"c{bits}-all:experts/s2"), qwen35, 40) == 40 * (4 + 32 + 4 + 0.25)
