"""Compile every kernel for an H100 or H200 and count the instructions of its main loop. Needs Triton, but no GPU.

    python benchmarks/instructions.py

The count is what decides whether FP4 pays on a GPU that has to widen it: at 4.3 TB/s there is time for 4.4 instructions
a value (docs/performance.md). Instructions are those of one warp for the loop's share of a tile, times 32 lanes,
divided by the values of the tile. A kernel without a loop is counted whole. Beside it stand the registers of a thread,
the shared memory of a program, and how many warps of them a multiprocessor holds, of 64; and what a step of the loop
waits for, if anything: what it loads by an ordinary load, or copies of which none are a step ahead.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import triton
from in_flight import Code, loops
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tracefp4.formats.fused import rules
from tracefp4.formats.numerics import get_numerics
from tracefp4.kernels import (
    attention_decode,
    attention_prefill,
    checks,
    choice,
    convolution,
    delta_rule,
    dequantize,
    enter,
    experts,
    experts_training,
    gate,
    gate_values,
    guided,
    kv_append,
    norm,
    planes,
    quantize,
    residual,
    rotary,
    routing,
    sample,
    stack,
    token_scores,
    turn,
)
from tracefp4.kernels import step as step_rows
from tracefp4.kernels.sizes import COMPARED_TOGETHER

TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
LINE = re.compile(r"\s+/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.x]+)([^;]*);")


def build(kernel: Any, pointers: dict[str, str], constants: dict[str, Any], **options: Any) -> Any:
    """Compile with pointers and strides divisible by 16, if a launch asks; floats by name, other arguments int32."""
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = pointers.get(name, "*bf16")
        else:
            signature[name] = "fp32" if name in ("factor", "shift", "eps", "scale", "temperature") else "i32"
    plain = {"factor", "shift", "eps", "steps", "parts", "tokens", "length", "window", "splits", "blocks", "vectors",
             "queries", "context", "record_start", "record_size", "pairs", "count", "x_groups", "per_global",
             "first_head", "heads", "experts"}  # fmt: skip
    divisible = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name not in {*constants, *plain} and not kernel.params[i].do_not_specialize_on_alignment
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=divisible)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def dump(kernel: Any, what: str) -> str:
    """Output of ``cuobjdump`` for the compiled kernel."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(kernel.asm["cubin"])
        return subprocess.run([TOOL, what, path], capture_output=True, text=True, check=True).stdout


def sass(kernel: Any) -> Code:
    """Address, operation and operands of every instruction."""
    return [(int(m[1], 16), m[2], m[3]) for m in map(LINE.match, dump(kernel, "-sass").splitlines()) if m]


def resident(registers: int, shared: int, warps: int) -> int:
    """Warps on a multiprocessor: 64 K registers, 256 at a time; 228 KiB shared, 1 KiB a program extra; 32 programs."""
    by_registers = 65536 // (-(-registers // 8) * 256 * warps)
    return warps * min(by_registers, 228 * 1024 // (shared + 1024), 64 // warps, 32)


def main_loop(code: Code, first: bool = False) -> Code:
    """The longest backward branch, or the ``first`` one; everything if there is none."""
    found = list(loops(code)) or [code]
    return found[0] if first else max(found, key=len)


def waiting(loop: Code) -> str:
    """What a loop waits for: loads into registers, and copies into shared memory if none may be left on its way."""
    loads = sum(op.startswith("LDG.") for _, op, _ in loop)
    copies = any(op.startswith("DEPBAR") and args.strip().endswith("SB0, 0x0") for _, op, args in loop)
    return f", waits for {loads} loads{' and all copies' * copies}" if loads or copies else ""


def report(name: str, kernel: Any, pointers: dict[str, str], constants: dict[str, Any], values: int,
           *, first: bool = False, **options: Any) -> bool:  # fmt: skip
    """Print one line; whether the kernel compiled. ``first``: its first loop is the one that counts."""
    try:
        built = build(kernel, pointers, constants, **options)
    except (RuntimeError, ValueError, TypeError, triton.TritonError, subprocess.CalledProcessError) as error:
        print(f"{name:44} FAILED: {str(error).splitlines()[0][:90]}")
        return False
    code = sass(built)
    loop = main_loop(code, first)
    spills = sum(op.startswith(("STL", "LDL")) for _, op, _ in code)
    top = " ".join(f"{op} {n}" for op, n in Counter(op.split(".")[0] for _, op, _ in loop).most_common(6))
    waits = waiting(loop) if loop is not code else ""
    each = len(loop) * 32 * options["num_warps"] / values
    found = re.search(r"REG:(\d+)", dump(built, "-res-usage"))
    registers, shared = int(found[1]) if found else 0, built.metadata.shared
    print(f"{name:44} {each:6.2f} a value, {len(loop):5} in the loop, {registers:3} registers, {shared:6} B shared, "
          f"{resident(max(registers, 16), shared, options['num_warps']):2} warps, {spills} spills{waits}  "
          f"{top}")  # fmt: skip
    return True


BYTES = "*u8"
SMALL = {
    "codes_ptr": BYTES, "packed_ptr": BYTES, "scales_ptr": BYTES, "planes_ptr": BYTES, "recorded_ptr": BYTES,
    "global_ptr": "*fp32", "new_global_ptr": "*fp32", "rows_ptr": "*i64", "valid_ptr": "*i1", "low_ptr": BYTES,
    "decode_ptr": "*fp32", "kept_ptr": BYTES, "record_ptr": BYTES, "slots_ptr": "*i64", "tickets_ptr": "*i32",
}  # fmt: skip


def rounding() -> list[bool]:
    """Quantizers, codec, and storing of keys and values."""
    done = []
    for name in ("nvfp4-te", "nvfp4-pow2", "mxfp4-ceil", "mxfp8"):
        n = rules(get_numerics(name))
        shared = {"TILE": 2048 // n.block, **n.constants()}
        wanted = {
            "GATED": False,
            "DECODE": False,
            "GIVEN": False,
            "CODES": False,
            "PACKED": False,
            "OPERAND": True,
            "VALUES": False,
            "VECTORS": 0,
        }
        for bits, vectors in ((0, 0), (1, 0), (1, 1)):
            constants = shared | wanted | {"BITS": bits, "VECTORS": vectors}
            done.append(report(f"quantize {name} r{bits}{' in place' * vectors}", quantize._quantize, SMALL, constants,
                               2048, num_warps=2, enable_fp_fusion=False))  # fmt: skip
        gated = shared | wanted | {"TILE": 1024 // n.block, "GATED": True, "DECODE": n.scope == "token", "BITS": 0}
        for more in ({}, {"BITS": 1, "VECTORS": 8}):
            done.append(report(f"gate and quantize {name}{' r1 in place' * bool(more)}", quantize._quantize, SMALL,
                               gated | more, 1024, num_warps=2, enable_fp_fusion=False))  # fmt: skip
        for gate_too in (False, True):
            constants = shared | {"GATED": gate_too, "BITS": 1, "VECTORS": 1}
            done.append(report(f"{'gate and ' * gate_too}compensate {name} r1 in place", residual._compensate, SMALL,
                               constants, 2048, num_warps=4, enable_fp_fusion=False))  # fmt: skip
        plain = {"GATED": False, "JOINED": 0, "ORDERED": False, "PARTIAL": False, "KEPT": 0, "CODES": False,
                 "PACKED": False, "OPERAND": True, "VALUES": False, "BITS": 1}  # fmt: skip
        forms: list[tuple[str, int, dict[str, Any]]] = [
            ("guided {} r1/s8", 2, {"SCALE_BITS": 8}),
            ("guided {} r1/s3 partial", 2, {"SCALE_BITS": 3, "ORDERED": True, "PARTIAL": True}),
            ("guided {} r4/s8", 2, {"SCALE_BITS": 8, "BITS": 4}),
            ("nearest {} at scales s2, r1 kept", 2, {"SCALE_BITS": 2, "BITS": 0, "KEPT": 1, "OPERAND": False}),
            ("gate and guided {} r1/s8", 4, {"SCALE_BITS": 8, "GATED": True}),
            ("gate and guided {} r1/s2", 4, {"SCALE_BITS": 2, "GATED": True}),
        ]
        if n.scope != "token":
            joined = {"SCALE_BITS": 2, "JOINED": 64 // n.block, "OPERAND": False, "VALUES": True}
            forms.append(("guided {} r1/s2, vectors of 64", 8, joined))
        for form, warps, own in forms:
            done.append(report(form.format(name), guided._quantize_guided, SMALL, shared | plain | own, 2048,
                               num_warps=warps, enable_fp_fusion=False))  # fmt: skip
        if n.eight:
            continue  # codes of eight bits are not kept
        done.append(report(f"dequantize {name}", dequantize._dequantize, SMALL | {"factor_ptr": "*fp32"},
                           {"TILE": 2048 // n.block, "BLOCK": n.block, "E8M0": n.e8m0, "FACTOR": True}, 2048,
                           num_warps=4, enable_fp_fusion=False))  # fmt: skip
    frames = {"frames_ptr": BYTES, "source_ptr": "*i64", "strip_ptr": "*i64", "out_ptr": BYTES}
    done.append(report("frames of a batch", stack._stack, frames, {"BYTES": 4096}, 4096, num_warps=4))
    sites = {f"x{i}_ptr": BYTES for i in range(COMPARED_TOGETHER)}
    sites |= {f"e{i}_ptr": "*i32" for i in range(COMPARED_TOGETHER)}
    pointers = sites | {"data_ptr": BYTES, "valid_ptr": "*i1", "keys_ptr": "*i64", "totals_ptr": "*i64",
                        "out_ptr": "*i32"}  # fmt: skip
    for word, kernel, own in (("checks of bits", checks._check, {"EACH": True, "VALID": True}),
                              ("checks of scales, counted", checks._count, {})):  # fmt: skip
        done.append(report(word, kernel, pointers, {"WORDS": 64, "WHOLE": True, **own}, 16 * 64,
                           num_warps=4))  # fmt: skip
    for bits in (1, 3, 4):
        done.append(report(f"pack r{bits}", planes._pack, SMALL, {"BITS": bits, "TILE": 512}, 4096, num_warps=4))
        whole = {"planes_ptr": "*i32", "low_ptr": "*i32"}
        constants = {"BITS": bits, "UNIT": 32, "TILE": 128}
        done.append(report(f"unpack r{bits}", planes._unpack, whole, constants, 4096, num_warps=4))
    for name in ("sglang-kv-nvfp4", "mxfp4-ceil"):
        for width, heads, queries, turned, norm_of in ((128, 4, 0, 128, ""), (128, 4, 32, 128, ""),
                                                       (128, 4, 32, 128, "norms"), (256, 2, 0, 256, ""),
                                                       (256, 2, 16, 64, "norms by 1 + weight")):  # fmt: skip
            constants = {"HEADS": heads, "D": width, "FP4": True, "QUERIES": queries, "ROWS": 4 if queries else 1,
                         "TURNED": turned, "NORM": bool(norm_of), "ADDED": "1 +" in norm_of,
                         **rules(get_numerics(name)).constants()}  # fmt: skip
            pointers = {"slots_ptr": "*i64", "codes_ptr": "*i16", "scales_ptr": BYTES}
            words = f" with queries, turned in {turned}" * bool(queries) + f", {norm_of}" * bool(norm_of)
            done.append(report(f"append {name} D{width}{words}", kv_append._append, pointers, constants, width,
                               num_warps=1, enable_fp_fusion=False))  # fmt: skip
    return done


def training() -> list[bool]:
    """Norms, rotary embedding and gate of a training step; a value is one of the input."""
    done, wide = [], {"inverse_ptr": "*fp32", "part_ptr": "*fp32"}
    for width in (64, 128):
        for back in (False, True):
            constants = {"ROWS": 4096 // width, "WIDTH": width, "STAGES": width.bit_length() - 1, "CENTRE": not back,
                         "BACK": back}  # fmt: skip
            done.append(report(f"{'gradient of ' * back}turned keys {width}", turn._turn,
                               {"centre_ptr": "*fp32", "signs_ptr": "*fp32"}, constants, 4096, num_warps=4,
                               enable_fp_fusion=False))  # fmt: skip
    for width in (64, 576, 2048):
        many, tile, warps = norm._sizes(width)
        sizes = {"ROWS": many, "TILE": tile}
        for word, kernel in (("norm", norm._norm), ("gradient of a norm", norm._norm_backward)):
            done.append(report(f"{word} {width}", kernel, wide, sizes, many * width, num_warps=warps,
                               enable_fp_fusion=False))  # fmt: skip
    done.append(report("sum of parts", norm._add_parts, wide, {"STEP": 32, "COLUMNS": 32}, 1024, num_warps=4))
    for back in (False, True):
        constants = {"Q_HEADS": 16, "K_HEADS": 4, "HALF": 32, "REAL": 32, "BACK": back, "q_last": 1, "k_last": 1}
        done.append(report(f"rotary{' back' * back}", rotary._rotate, {}, constants, 12 * 64, num_warps=4,
                           enable_fp_fusion=False))  # fmt: skip
    for word, kernel in (("gate values", gate_values._gate_values),
                         ("gradient of gate values", gate_values._gate_values_backward)):  # fmt: skip
        constants = {"TOP_K": 2, "ROWS": 128, "EXPERTS": 8, "RENORMALISED": True}
        done.append(report(word, kernel, {"index_ptr": "*i64"}, constants, 1024, num_warps=4,
                           enable_fp_fusion=False))  # fmt: skip
    some = {
        "target_ptr": "*i64",
        "grad_ptr": "*fp32",
        "lse_ptr": "*fp32",
        "logprob_ptr": "*fp32",
        "entropy_ptr": "*fp32",
    }
    for word, kernel, width in (("token scores", token_scores._scores, 2048),
                                ("gradient of token scores", token_scores._scores_backward, 4096)):  # fmt: skip
        done.append(report(word, kernel, some, {"WIDTH": width}, width, num_warps=8, enable_fp_fusion=False))
    done.append(report("gradient of the gate", gate._gate_backward, {}, {"TILE": 1024}, 1024, num_warps=4,
                       enable_fp_fusion=False))  # fmt: skip
    return done


def attention() -> list[bool]:
    """Decode and prefill attention; a value is one of K or V."""
    done = []
    pointers = {"pages_ptr": "*i64", "lengths_ptr": "*i64", "slots_ptr": "*i64", "table_ptr": "*i64",
                "part_ptr": "*fp32", "top_ptr": "*fp32", "sum_ptr": "*fp32", "sinks_ptr": "*fp32"}  # fmt: skip
    fp4 = pointers | {"codes_ptr": "*i16", "scales_ptr": BYTES}
    for width, heads, group in ((64, 8, 8), (128, 4, 8), (256, 2, 8)):
        common = {"HEADS": heads, "GROUP": group, "D": width}
        for word, mx, block in (("nvfp4", False, 16), ("mxfp4", True, 32), ("bf16", False, 16)):
            plain = word == "bf16"
            shared = common | {"FP4": not plain, "MX": mx, "BLOCK": block}
            for alone in (False, True):
                constants = shared | {"COLUMNS": 8, "PAGE": 16, "SPAN": 512, "ROWS": 32, "ALONE": alone, "SINKS": alone,
                             "NARROW": True, "WINDOWED": False}  # fmt: skip
                done.append(report(f"decode attention {word} D{width}{' alone' * alone}", attention_decode._split,
                                   pointers if plain else fp4, constants, 32 * 2 * width, first=True, num_warps=1,
                                   num_stages=3 if plain else 5))  # fmt: skip
            kinds = pointers if plain else fp4
            default = attention_prefill.depth(width, not plain, 128, 64, 227 * 1024)
            for rows, columns, warps, stages in (
                (128, 64, 8, default),
                (64, 64, 4, 5),
                (64, 32, 4, 5),
                (128, 32, 8, 5),
            ):
                constants = shared | {"QUERIES": rows, "COLUMNS": columns, "SINKS": False}
                name = f"prefill attention {word} D{width} {rows}x{columns} warps {warps}"
                done.append(report(name, attention_prefill._prefill, kinds, constants, columns * 2 * width,
                                   num_warps=warps, num_stages=stages))  # fmt: skip
    for together in (16, 32):
        done.append(report(f"decode attention: sum of {together} splits", attention_decode._combine, pointers,
                           {"D": 128, "SINKS": False, "TOGETHER": together}, 128 * together,
                           num_warps=together // 8))  # fmt: skip
    return done


def recurrence() -> list[bool]:
    """A step of a gated delta net; a value is one of the state, or a channel of the convolution."""
    done = []
    sizes = {"KEY_HEADS": 16, "HEADS": 32, "DK": 128, "DV": 128, "TILE": delta_rule.TILE}
    for word, kind in (("float32", "*fp32"), ("bfloat16", "*bf16")):
        done.append(report(f"delta rule, state in {word}", delta_rule._step, {"rows_ptr": "*i64", "state_ptr": kind},
                           sizes, 128 * delta_rule.TILE, num_warps=1))  # fmt: skip
    done.append(report("short convolution", convolution._convolve, {"rows_ptr": "*i64"}, {"BIAS": False, "TILE": 256},
                       256, num_warps=1))  # fmt: skip
    return done


def grouped(
    word: str, rows: int, columns: int, unroll: int, warps: int, *, second: bool = False, whole: bool = True
) -> tuple[dict[str, str], dict[str, Any]]:
    """Pointers and constants of the grouped product of nvfp4, mxfp4 or bf16 weights, with a tile of this size."""
    plain, mx, tile = word == "bf16", word == "mxfp4", experts.Config(columns, unroll, warps, 1)
    constants = {
        "TOP_K": 8, "ROWS": rows, "COLUMNS": columns, "UNROLL": unroll, "WHOLE": whole,
        "PAIRED": whole and tile.paired, "JOIN": tile.joined(rows), "FP4": not plain, "MX": mx,
        "BLOCK": 32 if mx else 16, "SHIFT": 128.0, "PER_TOKEN": True, "X_SCALE": word == "nvfp4", "ALPHA": not plain,
        "BIAS": False, "SECOND": second,
    } | ({} if second else {"second_ptr": None})  # fmt: skip
    return PRODUCT | ({} if plain else {"w_ptr": "*i16", "s_ptr": BYTES}), constants


PRODUCT = {"x_scale_ptr": "*fp32", "alpha_ptr": "*fp32", "order_ptr": "*i32", "tiles_ptr": "*i32"}


def products() -> list[bool]:
    """Expert products; a value is a weight."""
    done = []
    for word in ("nvfp4", "mxfp4", "bf16"):
        tiles = (
            (8, 128, 1, 4, 4), (16, 128, 1, 4, 4), (8, 16, 4, 1, 4), (64, 64, 1, 4, 4), (64, 128, 1, 4, 4)
        ) if word == "bf16" else (
            (8, 64, 1, 1, 3), (8, 64, 2, 1, 3), (8, 64, 4, 1, 2), (8, 32, 4, 1, 2), (8, 16, 4, 1, 4),
            (8, 128, 1, 1, 4), (8, 128, 1, 2, 4), (8, 256, 1, 4, 3), (16, 64, 1, 1, 3), (16, 128, 2, 4, 3),
            (64, 128, 2, 4, 3), (64, 128, 1, 4, 3), (64, 64, 1, 4, 6), (64, 64, 2, 4, 4),
            (128, 128, 1, 8, 3))  # fmt: skip
        for rows, columns, unroll, warps, stages in tiles:
            name = f"experts {word} {rows}x{columns}x{64 * unroll} warps {warps} stages {stages}"
            limited = rows == 8 and columns == 64
            for terms in (1, 2):
                pointers, constants = grouped(word, rows, columns, unroll, warps, second=terms == 2)
                limit = (80 if terms == 1 else 96) if limited else None
                done.append(report(name + " two terms" * (terms - 1), experts._grouped, pointers, constants,
                                   columns * 64 * unroll, num_warps=warps, num_stages=stages, maxnreg=limit,
                                   enable_fp_fusion=False))  # fmt: skip
    more = PRODUCT | {"starts_ptr": "*i64"}
    tile = {"TOP_K": 8, "ROWS": 128, "COLUMNS": 128, "STEP": 64, "PER_TOKEN": True}
    for word, inner in (("forward", "w_k"), ("gradient of x", "w_n")):
        constants = tile | {"EVEN": True, "X_SCALE": True, "ALPHA": True, inner: 1}
        done.append(report(f"training experts, {word}", experts_training._pairs, more, constants, 128 * 128,
                           num_warps=8, num_stages=3, enable_fp_fusion=False))  # fmt: skip
    done.append(report("training experts, gradient of W", experts_training._weights, more, tile | {"out_k": 1},
                       128 * 128, num_warps=8, num_stages=5))  # fmt: skip
    done += routing_of_a_layer()
    for made in (rules(get_numerics(name)) for name in ("nvfp4-te", "mxfp4-ceil")):
        constants = {"TILE": 2048 // made.block, "BITS": 1, "VECTORS": 1, "OFFSET": False, **made.constants()}
        done.append(report(f"into the experts, block {made.block}", enter._enter, SMALL, constants, 2048, num_warps=8,
                           enable_fp_fusion=False))  # fmt: skip
    constants = {"TOP_K": 8, "TILE": 1024, "ADDED": True}
    done.append(report("weighted sum", experts._weighted_sum, {"weights_ptr": "*fp32"}, constants, 8192, num_warps=2,
                       enable_fp_fusion=False))  # fmt: skip
    draws = {"stream_ptr": "*i64", "position_ptr": "*i64", "best_ptr": "*i32", "temperature_ptr": "*fp32",
             "floats_ptr": "*fp32"}  # fmt: skip
    done.append(report("sample", sample._draw, draws, {"WIDTH": 256}, 256, num_warps=1, enable_fp_fusion=False))
    return done


def routing_of_a_layer() -> list[bool]:
    """Choice of experts and tiles of pairs; one warp a program, so what counts is how long it is."""
    ids = {"experts_ptr": "*i64", "order_ptr": "*i32", "tiles_ptr": "*i32"}
    kinds = {"chosen_ptr": "*i64", "routes_ptr": BYTES, "slots_ptr": "*i64"}
    top = {"TOP_K": 8, "SLOTS": 8, "RENORMALISE": True, "RECORD": True}
    done = [
        report(f"choice of 8 of {experts}", choice._choose, kinds, top | {"EXPERTS": experts}, experts,
               num_warps=1, enable_fp_fusion=False)
        for experts in (128, 256)
    ]  # fmt: skip
    for step in (32, 128, 512):
        constants = {"ROWS": 8, "FULL": step > 8, "WORDS": 4, "STEP": step}
        done.append(report(f"route of {step} pairs, one expert", routing._count, ids, constants, step, num_warps=1))
    rows = {
        "positions_ptr": "*i64",
        "pages_ptr": "*i64",
        "lengths_ptr": "*i64",
        "record_ptr": "*i32",
        "narrow_ptr": "*i32",
    }
    tokens = {"tokens_ptr": "*i64", "source_ptr": "*i64", "before_ptr": "*i64"}
    for word, kernel, more in (("slots, lengths, tickets", step_rows._place, {"PAGE": 16}),
                               ("tokens of the step before", step_rows._take, {})):  # fmt: skip
        kinds = rows | tokens | {"tickets_ptr": "*i64", "slots_ptr": "*i64"}
        done.append(report(word, kernel, kinds, more | {"TILE": 128}, 128, num_warps=1))
    return done


if __name__ == "__main__":
    results = [*rounding(), *training(), *attention(), *recurrence(), *products()]
    print(f"\nTriton {triton.__version__}: {sum(results)} of {len(results)} kernels compiled for sm_90")
    sys.exit(0 if all(results) else 1)
