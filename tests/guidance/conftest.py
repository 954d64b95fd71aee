"""Records and frames to test with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
import xxhash

from tracefp4.core import Kind, Site, SiteShape
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.record import Record, SiteRecord, token_hash

NUMERICS = "0123456789abcdef"

Maker = Callable[..., Record]


def random_tensor(rng: np.random.Generator, shape: tuple[int, ...], high: int) -> torch.Tensor:
    return torch.from_numpy(rng.integers(0, high, shape, dtype=np.uint8))


def make_record(
    plan: str,
    shapes: Sequence[SiteShape],
    tokens: Sequence[int],
    *,
    num_layers: int = 1000,
    seed: int = 0,
    routes: tuple[torch.dtype, int, int] | None = None,
    weight_version: int = 3,
    absent: Sequence[int] = (),
) -> Record:
    rng = np.random.default_rng(seed)
    rows, parsed = len(tokens) - 1, Plan.parse(plan)
    valid = torch.ones(rows, dtype=torch.bool)
    valid[list(absent)] = False
    sites = {}
    for shape in parsed.select(shapes, num_layers):
        codes = random_tensor(rng, (rows, shape.vectors, shape.width), 16)
        scales = random_tensor(rng, (rows, shape.vectors, shape.width // shape.block), 127)
        wide = torch.from_numpy(rng.random((rows, shape.vectors), dtype=np.float32)) if shape.token_scale else None
        part = SiteRecord.pack(shape, codes, scales, wide, parsed.bits, parsed.scale_bits, valid)
        sites[shape.site] = part.reduce(parsed.bits, parsed.scale_bits, valid, checked=parsed.checked)
    experts = None
    if routes is not None:
        experts = torch.from_numpy(rng.integers(0, 200, (rows, *routes[1:]))).to(routes[0])
    return Record(plan, token_hash(tokens), NUMERICS, weight_version, rows, valid, sites, experts)


SMALL = (
    SiteShape(Site(0, Kind.EXPERTS_IN), 1, 48, 16, True),
    SiteShape(Site(0, Kind.EXPERTS_MID), 2, 16, 16, True),
    SiteShape(Site(1, Kind.K), 2, 32, 16, False),
    SiteShape(Site(1, Kind.LATENT), 1, 64, 32, False),
    SiteShape(Site(1, Kind.V), 2, 16, 16, False),
)


@pytest.fixture(scope="session")
def small_shapes() -> tuple[SiteShape, ...]:
    """Five kinds of site, with numbers of blocks that do not fill a byte."""
    return SMALL


@pytest.fixture(scope="session")
def make() -> Maker:
    """Builds a random record: ``make(plan, shapes, tokens, ...)``."""
    return make_record


@pytest.fixture(scope="session")
def small(make: Maker) -> Record:
    """A record of 19 rows that has every kind of section."""
    return make("r2-all+mid/s3", SMALL, range(100, 120), routes=(torch.int16, 2, 3), absent=[4, 17])


@pytest.fixture(scope="session")
def tiny(make: Maker) -> Record:
    """A record of 5 rows with one site, small enough for exhaustive tests."""
    return make("r1-all/s3", SMALL[:1], range(6), routes=(torch.uint8, 1, 2), absent=[1])


@pytest.fixture(scope="session")
def checked(make: Maker) -> Record:
    """A record of 19 rows under a checked plan."""
    return make("c1-all+mid/s2", SMALL, range(100, 120), absent=[4, 17])


@pytest.fixture(scope="session")
def reseal() -> Callable[[bytes], bytes]:
    """Gives altered bytes the checksum of a sound frame: what somebody who forges frames would do."""

    def seal(frame: bytes) -> bytes:
        return frame[:24] + xxhash.xxh3_128_digest(frame[:24] + frame[40:]) + frame[40:]

    return seal


@pytest.fixture(scope="session")
def qwen35() -> tuple[SiteShape, ...]:
    """Sites of Qwen3.5-35B-A3B: 40 MoE layers, hidden 2048, 256 experts, top 8, full attention every 4th."""
    shapes = []
    for layer in range(40):
        if (layer + 1) % 4 == 0:
            shapes += [SiteShape(Site(layer, kind), 2, 256, 16, False) for kind in (Kind.K, Kind.V)]
        shapes.append(SiteShape(Site(layer, Kind.EXPERTS_IN), 1, 2048, 16, True))
        shapes.append(SiteShape(Site(layer, Kind.EXPERTS_MID), 8, 512, 16, True))
    return tuple(shapes)
