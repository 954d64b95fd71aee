"""In what the installed Triton compiles, no register is written that a product of a warp group may still read."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "in_flight.py"


@pytest.fixture(scope="module")
def in_flight():
    spec = importlib.util.spec_from_file_location("in_flight", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def loop(*, left, word="R20", second=("HGMMA.64x64x16.F32.BF16", " R24, R108, gdesc[UR16], R24, gsb0 ")):
    """A loop with two products from registers 104 to 111, and then a wait that leaves some in flight."""
    lines = [
        ("LDSM.16.M88.4", f" {word}, [R90] "),
        ("HGMMA.64x64x16.F32.BF16", " R56, R104, gdesc[UR16], R56, gsb0 "),
        second,
        ("WARPGROUP.DEPBAR.LE", f" gsb0, {left:#x} "),
        ("BRA", " 0x10 "),
    ]
    return [(16 * (i + 1), *line) for i, line in enumerate(lines)]


def test_operands_of_products_in_flight_are_found(in_flight):
    assert in_flight.overwritten(loop(left=2)) == []
    assert in_flight.overwritten(loop(left=0, word="R104")) == []
    # One group is left, the later one: its operands begin at 108.
    assert in_flight.overwritten(loop(left=1, word="R104")) == []
    [line] = in_flight.overwritten(loop(left=1, word="R105"))
    assert "LDSM" in line and "range(108, 112)" in line  # four registers from 105 on
    assert len(in_flight.overwritten(loop(left=2, word="R104"))) == 1
    # A product without gsb0 belongs to the group that the next one closes.
    lone = ("HGMMA.64x64x16.F32.BF16", " R24, R108, gdesc[UR16], R24 ")
    assert len(in_flight.overwritten(loop(left=0, word="R108", second=lone))) == 1
    # As Triton 3.6 compiled MXFP4 tiles: three of four products are left, and the next step loads over the last one's.
    four = [line for line in loop(left=3, word="R104") if not line[1].startswith("HGMMA")]
    for place, first in enumerate((112, 88, 96, 104)):
        four.insert(1 + place, (17 + place, "HGMMA.64x64x16.F32.BF16", f" R24, R{first}, gdesc[UR16], R24, gsb0 "))
    assert [line.split(" while ")[1] for line in in_flight.overwritten(four)] == ["0x14 reads range(104, 108)"]
    assert [in_flight.from_registers(four), in_flight.from_registers(four[:1])] == [4, 0]
    # Operands in shared memory are no registers.
    shared = ("HGMMA.64x64x16.F32.BF16", " R24, gdesc[UR4], R24, gsb0 ")
    assert in_flight.overwritten(loop(left=1, word="R108", second=shared)) == []


@pytest.mark.parametrize(
    "operation, operands, registers",
    [
        ("LDG.E.U16", " R88, desc[UR14][R88.64] ", [88]),
        ("LDS.64", " R92, [R134+UR6+0x8000] ", [92, 93]),
        ("LDG.E.128", " R4, desc[UR14][R8.64] ", [4, 5, 6, 7]),
        ("IMAD.WIDE.U32", " R10, R2, 0x4, R8 ", [10, 11]),
        ("LOP3.LUT", " P0, R7, R8, 0x1, RZ, 0xc0, !PT ", [7]),
        ("STS.U16", " [R137+0x8000], R88 ", []),
        ("UIADD3", " UR9, UR9, 0x1, URZ ", []),
        ("ISETP.GE.AND", " P1, PT, R5, R6, PT ", []),
        ("CS2R", " R24, SRZ ", [24, 25]),
    ],
)
def test_registers_that_an_instruction_writes(in_flight, operation, operands, registers):
    assert list(in_flight.written(operation, operands)) == registers


@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux")
@pytest.mark.parametrize("mx", [False, True])
@pytest.mark.parametrize("tile", [(64, 1, 4, 6, 64), (64, 2, 4, 4, 32), (128, 1, 4, 3, 64), (256, 1, 4, 3, 16)])
def test_no_product_reads_what_is_overwritten(tile, mx):
    """In a process of its own: in this one kernels are interpreted, where there is no GPU."""
    pytest.importorskip("triton")
    code = (
        f"import in_flight, json; code, ptx = in_flight.compiled(*{tile}, {mx});"
        "loop = ptx[: ptx.index('wgmma.mma_async')].rsplit('Loop Header', 1)[1];"
        "print(json.dumps([in_flight.overwritten(code), in_flight.from_registers(code), loop]))"
    )
    path = os.pathsep.join([str(SCRIPT.parent), str(SCRIPT.parents[1] / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    lines, products, loop = json.loads(done.stdout)
    assert lines == [] and products > 0
    # Compilers differ in what they leave in flight; what is compiled waits before it writes the first operand.
    before = loop[: loop.index("mul.rn.bf16x2")]
    assert "wgmma.wait_group.sync.aligned 0" in before
