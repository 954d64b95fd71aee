"""Ten thousand steps of mixed traffic: nothing drifts, and memory is what it was at the start.

The same traffic runs twice through one engine. After the first pass whatever is made on first use exists, so the second
must end with the same memory, and it must return the same rollouts to the last bit. In between, the books are checked
against who is there: every page, every row of states, every frame.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tracefp4.core import Request, Rollout, SamplingParams

STEPS = 10_000
LIMITS: dict[str, Any] = {"max_tokens": 192, "page_size": 4, "max_batch": 6, "prefill_chunk": 24}
"""Few pages for what arrives, so that sequences are retracted."""


@dataclass
class Traffic:
    """Requests of all kinds at random times, some of them given up. What came of them is summed up, not kept."""

    engine: Any
    store: Any
    record: Any
    digest: Any = field(default_factory=hashlib.blake2b)
    flying: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def run(self, steps: int) -> None:
        """Take ``steps`` steps, then as many as it takes until nothing is in flight."""
        rng, step = random.Random(0), 0
        while step < steps or self.engine.busy:
            if step < steps:
                self._events(rng, step)
            if self.engine.busy:
                self._take(self.engine.step())
                step += 1
            if step % 100 == 0:
                self._check_books()
        self._check_books()
        assert not self.flying and not self.store.keys() and self.store.nbytes == 0

    def _events(self, rng: random.Random, step: int) -> None:
        if rng.random() < 0.15 and len(self.flying) < 6:
            self.counts["requests"] += 1
            name = f"{step}.{self.counts['requests']}"
            sampling = SamplingParams(
                temperature=rng.choice((0.0, 0.7, 1.0)), top_p=rng.choice((1.0, 1.0, 0.8)),
                top_k=rng.choice((0, 0, 5)), max_new_tokens=rng.randint(1, 24), seed=step,
                top_logprobs=rng.choice((0, 0, 0, 3)),
            )  # fmt: skip
            prompt = tuple(rng.randrange(256) for _ in range(rng.randint(1, 40)))
            self.flying.append(name)
            self.engine.add(Request(name, prompt, rng.randint(1, 4), sampling), guidance=rng.random() < 0.8)
        elif self.flying and rng.random() < 0.02:
            given_up = rng.choice(self.flying)
            self.flying.remove(given_up)
            dropped = self.engine.abort(given_up)
            self.counts["aborted"] += len(dropped)
            assert all(rollout.guidance is None for rollout in dropped)

    def _take(self, finished: list[Rollout]) -> None:
        for r in finished:
            self.counts["finished"] += 1
            kept = (r.request_id, r.sample, r.response_ids, r.logprobs, r.finish_reason, r.guidance is None)
            self.digest.update(repr(kept).encode())
            if r.guidance is not None:
                if self.counts["finished"] % 20 == 0:
                    assert self.record(r).valid.all()
                self.store.delete(r.guidance)
        self.flying = [name for name in self.flying if name in self.engine._active]

    def _check_books(self) -> None:
        """Owners of pages and of state rows are exactly those who are there."""
        engine = self.engine
        scheduler, pages, states = engine.scheduler, engine.pages, engine.states
        owners = [*scheduler.running, *scheduler.resident, *engine._loop._ended]
        owned = Counter(page for owner in owners for page in owner.pages)
        assert pages._owners == [owned[page] for page in range(pages.num_pages)]
        assert sorted(pages._free) == [page for page in range(pages.num_pages) if not owned[page]]
        rows = [owner.state_row for owner in owners if owner.state_row is not None]
        assert len(set(rows)) == len(rows) == states.rows - states.free
        assert all(prefix.state_row is None and not prefix.pages for prefix in scheduler.waiting)


def held(device: torch.device) -> str:
    """Objects of Python that are alive, their bytes, both by type, and bytes of the device; on a CPU of live tensors.

    As a string, which is not among them when it is kept.

    Caches that keep a bounded number of results are emptied first: what they keep depends on who came last.
    """
    for found in gc.get_objects():
        if type(found) is functools._lru_cache_wrapper and found.__module__.startswith("tracefp4"):
            found.cache_clear()
    gc.collect()
    alive = gc.get_objects()
    storages = [found.untyped_storage() for found in alive if type(found) is torch.Tensor]
    there = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    if device.type == "cuda":
        torch.cuda.synchronize()
        there = torch.cuda.memory_allocated()
    # Looking at a tensor's storage makes an object of it, which claims the tensor's bytes once more.
    own = [found for found in alive if type(found) not in (torch.Tensor, torch.UntypedStorage)]
    objects, sizes = Counter[str](), Counter[str]()
    for found in own:
        objects[type(found).__qualname__] += 1
        sizes[type(found).__qualname__] += sys.getsizeof(found)
    return json.dumps([objects, sizes, there])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe"])
def test_ten_thousand_steps_leave_nothing_behind(make_bench, kernel_sizes, uses_kernels, device, family):
    steps, on_gpu = STEPS if family == "qwen3_moe" else STEPS // 10, device.type == "cuda"
    settings = {"plan": "r1-all+mid/s3", "device": str(device), **LIMITS}
    if on_gpu:  # as it is used there: kernels, and graphs of whole steps
        settings |= {"dtype": torch.bfloat16, "model_options": kernel_sizes(family)}
    bench, digests, memory = make_bench(family, **settings), [], []
    assert uses_kernels(bench.engine) == on_gpu
    held(device)  # what looking itself makes on first use
    for _ in range(2):
        traffic = Traffic(bench.engine, bench.store, bench.record)
        traffic.run(steps // 2)
        digests.append(traffic.digest.hexdigest())
        assert traffic.counts["finished"] > steps // 20 and traffic.counts["aborted"] > 0
        del traffic
        memory.append(held(device))
    assert bench.engine.stats.retractions > 0 and bench.engine.stats.steps >= steps
    assert (bench.engine.stats.graph_steps > steps // 2) == on_gpu
    assert digests[0] == digests[1]
    (objects, sizes, there), (later_objects, later_sizes, later_there) = map(json.loads, memory)
    assert later_there == there
    for before, later, limit in ((objects, later_objects, 10), (sizes, later_sizes, 4_096)):
        grown = {kind: later.get(kind, 0) - before.get(kind, 0) for kind in before | later}
        assert sum(grown.values()) < limit, {kind: by for kind, by in grown.items() if by}

    wanted = [Request(name, tuple(range(3, 20)), 3, SamplingParams(max_new_tokens=12, seed=1)) for name in "ab"]
    fresh = make_bench(family, **settings)
    for one, other in zip(bench.engine.generate(wanted), fresh.engine.generate(wanted), strict=True):
        assert one.response_ids == other.response_ids and one.logprobs == other.logprobs
        assert torch.equal(one.routes, other.routes)
        mine, theirs = bench.record(one), fresh.record(other)
        assert all(torch.equal(found.planes, theirs.sites[site].planes) for site, found in mine.sites.items())
