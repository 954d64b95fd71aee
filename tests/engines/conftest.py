"""Real engines on a tiny model. An engine takes long to start, so each test module shares one of each kind."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tracefp4.config import EngineConfig
from tracefp4.core import Request, Rollout, SamplingParams
from tracefp4.formats.spec import Spec, get_spec
from tracefp4.guidance.frame import decode
from tracefp4.guidance.memory_store import MemoryStore
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.record import Record
from tracefp4.models.layout import ModelLayout, describe
from tracefp4.models.packing import PackedState
from tracefp4.models.tiny import tiny_model
from tracefp4.rollout.registry import engine_names, make_engine

HARNESS = Path(__file__).parent / "harness"
SIZES: dict[str, dict[str, Any]] = {
    "embedded": {"page_size": 4},
    # Optimistic, so that it admits more than fits and has to retract.
    "sglang": {"page_size": 1, "options": {"schedule_conservativeness": 0.0}},
    "vllm": {"page_size": 32},
    # The attention backend that a GPU gets, in plain torch.
    "vllm, FP4 pages": {"page_size": 32, "options": {"attention_backend": "CUSTOM"}},
}
"""What engines need besides the common sizes. What follows a comma tells variants of an engine apart."""


@dataclass
class Bench:
    """An engine, a copy of the weights that it started with, and the store between."""

    name: str
    engine: Any
    model: Any
    spec: Spec
    store: MemoryStore
    layout: ModelLayout = field(init=False)

    def __post_init__(self) -> None:
        self.layout = describe(self.model)

    def record(self, rollout: Rollout) -> Record:
        assert rollout.guidance is not None
        return decode(self.store.get(rollout.guidance))

    def packed(self, model: Any = None) -> PackedState:
        assert self.spec.weights is not None
        return PackedState(model or self.model, self.layout, self.spec.weights, self.state(model))

    def state(self, model: Any = None) -> dict[str, torch.Tensor]:
        return dict((model or self.model).named_parameters())


def _installed(name: str) -> bool:
    return name == "embedded" or (name in engine_names() and importlib.util.find_spec(name) is not None)


@pytest.fixture(scope="session")
def cpu_harness() -> Iterator[None]:
    """Stand-ins for what SGLang imports and a CPU does not have, in the engines' processes alone."""
    if torch.cuda.is_available() or importlib.util.find_spec("sglang") is None:
        yield
        return
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HARNESS), *([before] if before else [])])
    yield
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


ENGINES = ["embedded", *(pytest.param(name, marks=pytest.mark.engine) for name in SIZES if name != "embedded")]


@contextmanager
def started(name: str, spec: Spec, dtype: torch.dtype) -> Iterator[Bench]:
    """An engine on the tiny model, with whole codes of every site recorded."""
    variant, name = name, name.partition(",")[0]
    if not _installed(name):
        pytest.skip(f"engine {name!r} is not installed here")
    build, store = {"seed": 3, "dtype": dtype}, MemoryStore()
    sizes = {"max_tokens": 512, "max_batch": 8, "prefill_chunk": 32} | SIZES[variant]
    engine = make_engine(
        name,
        model=tiny_model("qwen3_moe", **build),
        tokenizer=None,
        spec=spec,
        plan=Plan.parse("r4-all+mid/s8"),
        store=store,
        settings=EngineConfig(**sizes),
    )
    try:
        yield Bench(name, engine, tiny_model("qwen3_moe", **build), spec, store)
    finally:
        engine.close()


@pytest.fixture(scope="module", params=ENGINES)
def bench(request: pytest.FixtureRequest, cpu_harness: None) -> Iterator[Bench]:
    """One engine of each kind, in float32, so that a difference is a mistake and not rounding noise."""
    with started(request.param, get_spec("nvfp4-w4a4-kv4"), torch.float32) as found:
        yield found


@pytest.fixture(params=ENGINES)
def engine_name(request: pytest.FixtureRequest, cpu_harness: None) -> str:
    """Each engine's name, where it is installed."""
    if not _installed(request.param):
        pytest.skip(f"engine {request.param!r} is not installed here")
    return request.param


@pytest.fixture(params=ENGINES)
def mx_engine(request: pytest.FixtureRequest, cpu_harness: None) -> Any:
    """Starts an engine with an MXFP4 spec, in bfloat16: the proof after a sync has to bear the noise of deployment."""
    return lambda spec: started(request.param, get_spec(spec), torch.bfloat16)


@pytest.fixture
def compared(cpu_harness: None) -> Any:
    """Starts an engine by name, in float32."""
    return lambda name: started(name, get_spec("nvfp4-w4a4-kv4"), torch.float32)


@pytest.fixture
def served(bench: Bench) -> Bench:
    """The engine with the weights of ``bench.model`` and nothing in the store."""
    bench.store.clear()
    bench.engine.sync(bench.state(), 1)
    return bench


def request_of(name: str, length: int, samples: int = 1, **sampling: Any) -> Request:
    """A request with a prompt that depends on its name."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    prompt = tuple(torch.randint(0, 256, (length,), generator=generator).tolist())
    return Request(name, prompt, samples, SamplingParams(**{"max_new_tokens": 8, "seed": 7, **sampling}))


@pytest.fixture
def ask() -> Any:
    return request_of
