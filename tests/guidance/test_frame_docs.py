"""docs/frame-format.md: its reader reads our frames, its example is ours, and its limits are the real ones."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import numpy as np
import pytest

from tracefp4.guidance.frame import encode
from tracefp4.guidance.header import LIMITS, build_header, sections
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.record import Record

PAGE = (Path(__file__).parents[2] / "docs" / "frame-format.md").read_text()


@pytest.mark.parametrize("name", ["small", "tiny", "checked"])
def test_the_reader_of_the_page(request: pytest.FixtureRequest, tmp_path: Path, name: str) -> None:
    record: Record = request.getfixturevalue(name)
    script = tmp_path / "reader.py"
    script.write_text(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0])
    found = runpy.run_path(str(script), init_globals={"frame": encode(record)})
    assert found["valid"].tolist() == record.valid.tolist()
    held = "code_checks" if name == "checked" else "codes"
    assert len(found[held]) == len(found["codes"]) + len(found["code_checks"]) == len(record.sites)
    for site, part in record.sites.items():
        key, outcome = (site.layer, site.kind.value), part.outcome()
        if part.code_checks is None:
            assert np.array_equal(found["codes"][key].reshape(-1, part.shape.width), outcome.low.numpy())
        else:
            assert np.array_equal(found["code_checks"][key], part.code_checks.numpy().view(np.uint32))
        assert np.array_equal(found["scales"][key].reshape(outcome.scales.shape), outcome.scales.numpy())
        if outcome.global_scale is not None:
            assert np.array_equal(found["global_scales"][key].reshape(-1, 1), outcome.global_scale.numpy())


def test_the_example_of_the_page(tiny: Record) -> None:
    frame = encode(tiny)
    assert f"are {len(frame)} bytes" in PAGE
    start = " ".join(
        [frame[:8].hex(" "), "", frame[8:10].hex(" "), "", frame[10:12].hex(" "), "", frame[12:16].hex(" ")]
    )
    assert f"{start}  {frame[16:24].hex(' ')}" in PAGE
    shapes = [part.shape for part in tiny.sites.values()]
    header, _ = build_header(Plan.parse(tiny.plan), shapes, tiny.rows, routes=("uint8", 1, 2))
    table = re.findall(r"\| (\d+) \| (?:[^|]* = )?(\d+) \|\n", PAGE.split("## An example")[1])
    assert [(int(offset), int(size)) for offset, size in table] == list(sections(header))


def test_the_limits_of_the_page() -> None:
    text = " ".join(PAGE.split("## Limits")[1].split())
    for value, what in (
        (LIMITS.total_bytes, "frames over 2^{} bytes"),
        (LIMITS.header_bytes, "headers over 2^{}"),
        (LIMITS.rows, "2^{} rows"),
        (LIMITS.sites, "2^{} sites"),
        (LIMITS.vectors, "2^{} vectors"),
        (LIMITS.width, "2^{} values a vector"),
        (LIMITS.layers, "2^{} layers"),
    ):
        assert what.format(value.bit_length() - 1) in text
