"""What the installed Triton makes of rounding kernels keeps subnormals: no operation takes them for 0."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = """
import json, re, sys
from instructions import SMALL, build, get_numerics, guided, quantize, rules
found = {}
for name in ("nvfp4-te", "mxfp8"):
    n = rules(get_numerics(name))
    shared = {"TILE": 2048 // n.block, "GATED": False, "PACKED": False, "OPERAND": True, "VALUES": False}
    shared |= n.constants()
    follow = {"JOINED": 0, "ORDERED": False, "PARTIAL": True, "KEPT": 0, "CODES": True, "SCALE_BITS": 2}
    own = {"DECODE": False, "GIVEN": False, "CODES": True, "VECTORS": 0, "BITS": 1}
    kernels = {f"guided r{bits}": (guided._quantize_guided, shared | follow | {"BITS": bits}) for bits in (1, 4)}
    for word, (kernel, constants) in {**kernels, "nearest": (quantize._quantize, shared | own)}.items():
        ptx = build(kernel, SMALL, constants, num_warps=2, enable_fp_fusion=False).asm["ptx"]
        found[f"{name} {word}"] = [len(re.findall(r"\\badd\\.r[mp]\\.f32", ptx)), re.findall(r"\\S+\\.ftz\\S*", ptx)]
print(json.dumps(found))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux")
def test_rounding_keeps_subnormals():
    """In a process of its own: in this one kernels are interpreted, where there is no GPU."""
    pytest.importorskip("triton")
    path = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 6
    for kernel, (directed, flushing) in found.items():
        assert not flushing and (directed > 0) == ("guided" in kernel), kernel
