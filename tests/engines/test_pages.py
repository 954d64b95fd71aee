"""VLLM's two ways to an FP4 cache on a CPU: rounded values in its own cache, and FP4 pages as a GPU gets them."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.engine
def test_pages_and_rounded_values_are_one_cache(compared, ask):
    """The same tokens and the same outcome at every site, by two attention backends over two layouts."""
    requests = [ask("long", 75), ask("two", 20, samples=2), ask("short", 3)]
    found = {}
    for name in ("vllm", "vllm, FP4 pages"):
        with compared(name) as bench:
            rollouts = bench.engine.generate(requests)
            found[name] = [(r, bench.record(r)) for r in rollouts]
            facts = bench.engine.report.facts
            assert facts["attention"] == ("PagedAttention" if "pages" in name else "TraceAttention")
            # What is stored by slot is the pages' own business, and not kept twice.
            found[name, "bytes"] = facts["recorder_bytes"]
    for (left, a), (right, b) in zip(*(found[name] for name in ("vllm", "vllm, FP4 pages")), strict=True):
        assert left.tokens == right.tokens
        torch.testing.assert_close(torch.tensor(left.logprobs), torch.tensor(right.logprobs), rtol=0, atol=1e-4)
        assert bool(a.valid.all()) and bool(b.valid.all()) and a.sites.keys() == b.sites.keys()
        for site in a.sites:
            assert torch.equal(a.sites[site].planes, b.sites[site].planes), site
            assert torch.equal(a.sites[site].scales, b.sites[site].scales), site
    assert found["vllm, FP4 pages", "bytes"] < found["vllm", "bytes"]
