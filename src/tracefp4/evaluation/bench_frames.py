"""Guidance on the host: how fast frames are written, read and laid out, beside copying and hashing alone.

A frame is copied once out of the rows that came from the GPU, and hashed once; whoever reads it hashes it again, and
copies it into the buffer of its micro-batch. So with ``c`` and ``h`` the bytes a second of a plain copy and of XXH3 on
this host, measured in the same run on memory of the same size,

    write   1 / (1 / c + 1 / h)        read   h        stage   c

bound the three. All is done one frame after the other, and side by side as a group of frames is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import numpy as np
import torch
import xxhash

from tracefp4.evaluation.bench import Bench, Row, host_seconds
from tracefp4.evaluation.bench_shapes import SHAPES, random_model
from tracefp4.formats.spec import get_spec
from tracefp4.guidance.codec import CHUNK, chunks
from tracefp4.guidance.frame import Expectation, decode, encode_rows
from tracefp4.guidance.header import checksum_of
from tracefp4.guidance.layout import table_of
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.sheaf import Sheaf
from tracefp4.guidance.workers import side_by_side
from tracefp4.models.layout import describe
from tracefp4.training.staging import stack_sites

SPEC, PLAN = "nvfp4-w4a4-kv4", "r1-all+mid/s3"


def bench_frames(bench: Bench, name: str = "smollm2-moe", frames: int = 64, rows: int = 129) -> None:
    """Gigabytes of frames a second, for ``frames`` sequences of ``rows`` rows of the model of shape ``name``."""
    layers = SHAPES[name].layers
    layout = describe(random_model(SHAPES[name].config(layers), torch.device("meta")))
    plan = Plan.parse(PLAN)
    shapes = plan.select(layout.site_shapes(get_spec(SPEC)), layers)
    step = chunks(rows) * CHUNK
    sheaf = Sheaf.new(plan, table_of(shapes), (torch.arange(frames * step) % step) < rows)
    sheaf.data.zero_()
    about = {"token_hash": "0" * 32, "numerics_hash": get_spec(SPEC).hash, "weight_version": 1}
    write = [partial(encode_rows, sheaf, i * step, rows, **about) for i in range(frames)]
    made = [work() for work in write]
    size = len(made[0])
    source, target = (np.ones((frames, size), np.uint8) for _ in range(2))
    copy = [partial(np.copyto, a, b) for a, b in zip(target, source, strict=True)]
    digest = [lambda part=part: xxhash.xxh3_128(part.data).digest() for part in source]
    expect = Expectation(plan=PLAN, shapes=shapes)
    records = [decode(frame, expect) for frame in made]
    case = f"frames {name} {frames}x{rows}"

    def rate(run: Callable[[], object]) -> float:
        return frames * size / median(host_seconds(run, bench.repeats)) / 1e9

    for arm, threads in (("", 1), (" side by side", None)):
        copied, hashed = (rate(partial(side_by_side, works, threads)) for works in (copy, digest))
        detail = f"{size / 1e6:.2f} MB a frame; copy {copied:.1f}, hash {hashed:.1f} GB/s"
        bound = 1 / (1 / copied + 1 / hashed)
        bench.keep(Row(case, f"write{arm}", rate(partial(side_by_side, write, threads)), "GB/s", bound, None, detail))
        read = rate(partial(_read, made, expect, threads))
        bench.keep(Row(case, f"read{arm}", read, "GB/s", hashed))
    staged = rate(lambda: stack_sites(records, records[0], rows, torch.device("cpu")))
    bench.keep(Row(case, "stage side by side", staged, "GB/s", copied))


def _read(frames: Sequence[memoryview], expect: Expectation, threads: int | None) -> None:
    """What a run does: hashes side by side, headers one after the other."""
    checksums = side_by_side([partial(checksum_of, frame) for frame in frames], threads)
    for frame, checksum in zip(frames, checksums, strict=True):
        decode(frame, expect, checksum=checksum)
