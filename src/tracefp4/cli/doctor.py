"""``tracefp4 doctor``: what this machine can do, and whether the parts fit together.

Each line is ``ok``, ``warn`` (something is missing that only some commands need, or is newer than what was tested) or
``fail`` (nothing will work). The exit code is 1 if a line failed. Nothing is fetched and nothing is written.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Literal

import typer

from tracefp4 import __version__
from tracefp4.cli.console import JsonOption, emit
from tracefp4.errors import TraceError
from tracefp4.models.directory import CACHE_VARIABLE, cache_path, quiet

Status = Literal["ok", "warn", "fail"]

ENGINE_GROUP = "tracefp4.engines"
"""Entry-point group under which an installed package offers a rollout engine."""

SUPPORTED: dict[str, tuple[str, str]] = {"torch": ("2.11", "2.14"), "transformers": ("5.17", "5.25")}
"""Oldest supported version, and the first one that is newer than what was tested."""

EXTRAS: dict[str, tuple[str, ...]] = {
    "rl": ("reasoning_gym", "math_verify", "pyarrow"),
    "models": ("gguf", "sentencepiece"),
    "report": ("matplotlib",),
    "export": ("compressed_tensors",),
}
"""Modules behind each optional part of the installation."""

_FP4_CAPABILITY = (10, 0)
_LOW_MEMORY = 4 * 2**30


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the diagnosis."""

    name: str
    status: Status
    detail: str


def run(as_json: JsonOption = False) -> None:
    """Check this machine: versions, devices, FP4 support, memory, optional parts, and the seams of transformers.

    Every line is ok, warn (some commands will miss it) or fail (nothing will work); the exit code is 1 if one failed.
    """
    checks = list(diagnose())
    failed = any(check.status == "fail" for check in checks)
    width = max(len(check.name) for check in checks)
    lines = [f"{check.status:<4}  {check.name:<{width}}  {check.detail}" for check in checks]
    data = {"ok": not failed, "version": __version__, "checks": [asdict(check) for check in checks]}
    emit(data, as_json=as_json, text="\n".join(lines))
    if failed:
        raise typer.Exit(1)


def diagnose() -> Iterable[Check]:
    """All checks, in the order in which they are printed."""
    yield Check("tracefp4", "ok", __version__)
    yield _python()
    for package, (oldest, untested) in SUPPORTED.items():
        yield check_version(package, _installed(package), oldest, untested)
    yield from _devices()
    yield _memory()
    for extra, modules in EXTRAS.items():
        yield _extra(extra, modules)
    yield _engines()
    yield _cache()
    yield _seams()


def environment() -> dict[str, str]:
    """What a result depends on besides its configuration: versions and device, for the summary of a run."""
    found = {name: _installed(name) or "not installed" for name in ("torch", "transformers", "numpy", "safetensors")}
    devices = {check.name: check.detail for check in _devices()}
    return {
        "tracefp4": __version__,
        "python": platform.python_version(),
        **found,
        "platform": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        **devices,
    }


def check_version(package: str, version: str | None, oldest: str, untested: str) -> Check:
    """Compare an installed version with the supported range ``oldest <= version < untested``."""
    if version is None:
        return Check(package, "fail", f"not installed; pip install '{package}>={oldest}'")
    if _release(version) < _release(oldest):
        return Check(package, "fail", f"{version} is too old; pip install -U '{package}>={oldest}'")
    if _release(version) >= _release(untested):
        return Check(package, "warn", f"{version} is newer than what was tested (below {untested})")
    return Check(package, "ok", version)


def _python() -> Check:
    version = platform.python_version()
    status: Status = "ok" if sys.version_info >= (3, 11) else "fail"
    return Check("python", status, version if status == "ok" else f"{version} is too old; 3.11 is the oldest")


def _devices() -> Iterable[Check]:
    if _installed("torch") is None:
        return
    import torch

    if not torch.cuda.is_available():
        count = torch.get_num_threads()
        threads = "1 thread" if count == 1 else f"{count} threads"
        yield Check("device", "ok", f"CPU, {threads}; torch sees no CUDA device")
        yield Check("FP4 hardware", "ok", "no; FP4 arithmetic is emulated exactly")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        size = f"{properties.total_memory / 2**30:.0f} GiB"
        yield Check(
            f"cuda:{index}",
            "ok",
            f"{properties.name}, {size}, compute capability {properties.major}.{properties.minor}",
        )
        native = capability >= _FP4_CAPABILITY
        detail = "FP4 tensor cores" if native else "no FP4 tensor cores; FP4 arithmetic is emulated exactly"
        yield Check("FP4 hardware", "ok", f"cuda:{index} has {detail}")


def _memory() -> Check:
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    total = pages * size
    if total < _LOW_MEMORY:
        return Check("memory", "warn", f"{total / 2**30:.1f} GiB; the quickstart needs about 4 GiB")
    return Check("memory", "ok", f"{total / 2**30:.0f} GiB")


def _extra(extra: str, modules: tuple[str, ...]) -> Check:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        return Check(f"extra {extra}", "warn", f"no {', '.join(missing)}; pip install 'tracefp4[{extra}]'")
    return Check(f"extra {extra}", "ok", ", ".join(modules))


def _engines() -> Check:
    found = sorted(point.name for point in metadata.entry_points(group=ENGINE_GROUP))
    return Check("engines", "ok", ", ".join(["embedded", *(name for name in found if name != "embedded")]))


def _cache() -> Check:
    folder = cache_path()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return Check("cache", "warn", f"{folder} cannot be written; set {CACHE_VARIABLE} to a folder that can")
    return Check("cache", "ok", str(folder))


def _seams() -> Check:
    started = time.perf_counter()
    return _guarded("transformers seams", lambda: _seam_result(started))


def _seam_result(started: float) -> Check:
    with quiet():
        from tracefp4.cli.selftest import check_seams

        fault = check_seams()
    if fault is not None:
        return Check("transformers seams", "fail", fault)
    return Check(
        "transformers seams", "ok", f"experts, router and attention reached ({time.perf_counter() - started:.1f} s)"
    )


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    """A doctor reports what a broken installation raises instead of ending with it."""
    try:
        return check()
    except (TraceError, ImportError, AttributeError, TypeError, RuntimeError) as error:
        return Check(name, "fail", f"{type(error).__name__}: {error}")


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    """The numbers in front of any suffix: ``"2.13.0+cpu"`` is ``(2, 13, 0)``."""
    numbers: list[int] = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)
