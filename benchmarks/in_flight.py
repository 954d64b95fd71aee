"""Find registers that are written while a product in flight still reads them. Needs Triton, but no GPU.

    python benchmarks/in_flight.py

On Hopper a warp group begins a product (``HGMMA``) and goes on. Operands may lie in registers, and those must stay as
they are until a wait (``WARPGROUP.DEPBAR``) has seen the product's group end. Who breaks that gets a right result
nearly always: the tensor core has mostly read them by then. MXFP4 experts of 4-warp programs did so as Triton 3.6
compiles them, and on a busy GPU a result in some 1e9 was a NaN.

The program walks every loop of a compiled kernel twice and notes which groups may be in flight at each instruction.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

Code = list[tuple[int, str, str]]
"""Address, operation and operands of every instruction."""

_HARMLESS = (
    "ST", "BAR", "BRA", "LDGSTS", "LDGDEPBAR", "DEPBAR", "WARP", "EXIT", "NOP", "RED", "MEMBAR", "FENCE", "R2UR", "U",
    "HGMMA",
)  # fmt: skip
"""Operations that write no register of a thread; accumulators are the compiler's own business."""
_FROM_REGISTERS = re.compile(r"\s*R\d+,\s*R(\d+)")
"""Operands of a product whose first factor lies in registers, and the first of those."""


def written(operation: str, operands: str) -> range:
    """Registers that an instruction writes."""
    base, last = operation.split(".")[0], operation.split(".")[-1]
    found = re.match(r"\s*(?:P\w+,\s*)?R(\d+)\b", operands)
    if base.startswith(_HARMLESS) or not found:
        return range(0)
    count = 1
    if base == "LDSM":
        count = int(last) if last.isdigit() else 1
    elif base.startswith("LD") and (".128" in operation or ".64" in operation):
        count = 4 if ".128" in operation else 2
    elif ".WIDE" in operation or (base == "CS2R" and last != "32"):
        count = 2
    return range(int(found[1]), int(found[1]) + count)


def loops(code: Code) -> Iterator[Code]:
    """What every backward branch repeats, the branch included."""
    at = {address: index for index, (address, _, _) in enumerate(code)}
    for index, (address, operation, operands) in enumerate(code):
        target = re.search(r"0x([0-9a-f]+)", operands)
        if operation.startswith("BRA") and target and int(target[1], 16) < address:
            yield code[at[int(target[1], 16)] : index + 1]


def overwritten(code: Code) -> list[str]:
    """What is written too early in the loops of a kernel, a line each; empty if all is well."""
    return list(dict.fromkeys(line for body in loops(code) for line in _walk(body * 2)))


def _walk(body: Code) -> list[str]:
    found, groups, begun = [], [], []
    for address, operation, operands in body:
        if operation.startswith("HGMMA"):
            first = _FROM_REGISTERS.match(operands)
            if first:
                begun.append((address, range(int(first[1]), int(first[1]) + 4)))
            if "gsb0" in operands:
                groups.append(begun)
                begun = []
        elif operation.startswith("WARPGROUP.DEPBAR"):
            left = int(operands.rsplit("0x", 1)[1], 16)
            groups = groups[len(groups) - left :] if left else []
        else:
            new = set(written(operation, operands))
            for group in (*groups, begun):
                found += [f"{address:#x} {operation}{operands.rstrip()} while {began:#x} reads {registers}"
                          for began, registers in group if new.intersection(registers)]  # fmt: skip
    return found


def from_registers(code: Code) -> int:
    """Products whose first operand lies in registers; without one there is nothing to check."""
    return sum(op.startswith("HGMMA") and bool(_FROM_REGISTERS.match(args)) for _, op, args in code)


def compiled(
    columns: int, unroll: int, warps: int, stages: int, rows: int, mx: bool, *, second: bool = False, whole: bool = True
) -> tuple[Code, str]:
    """The grouped expert product with this tile: its instructions, and the PTX that they were made of."""
    from instructions import build, grouped, sass

    from tracefp4.kernels import experts

    word = "mxfp4" if mx else "nvfp4"
    pointers, constants = grouped(word, rows, columns, unroll, warps, second=second, whole=whole)
    built = build(experts._grouped, pointers, constants, num_warps=warps, num_stages=stages, enable_fp_fusion=False)
    return sass(built), built.asm["ptx"]


TILES = ((64, 1, 4, 6), (64, 2, 4, 4), (128, 1, 4, 3), (128, 2, 4, 3),
         (64, 1, 4, 3), (64, 1, 4, 4), (64, 2, 4, 3), (64, 1, 4, 8), (128, 1, 4, 4), (128, 1, 4, 6), (128, 1, 8, 3),
         (256, 1, 4, 3))  # fmt: skip
"""Columns, unroll, warps and stages: first those that launches choose, then those that the benchmark compares."""
CHOSEN = TILES[:4]


def main() -> int:
    """Check every tile of several warps that launches choose or that the benchmark compares."""
    bad = 0
    for mx in (False, True):
        for tile in TILES:
            for rows in (16, 32, 64):
                for second, whole in ((False, True), (True, True), (False, False), (True, False)):
                    if (second or not whole) and tile not in CHOSEN:
                        continue
                    code, _ = compiled(*tile, rows, mx, second=second, whole=whole)
                    lines = overwritten(code)
                    bad += bool(lines)
                    name = f"{'mxfp4' if mx else 'nvfp4'} {rows} rows, {'two terms' if second else 'one term'}"
                    name += "" if whole else ", masked columns"
                    print(f"{name}, columns, unroll, warps, stages {tile}: {len(lines)} of {from_registers(code)}",
                          *lines[:2], sep="\n  ")  # fmt: skip
    print(f"{bad} kernels write registers that are in use")
    return bad


if __name__ == "__main__":
    sys.exit(bool(main()))
