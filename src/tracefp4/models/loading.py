"""Models by name: one function, whatever the model is.

=====================  ================================================================================================
``smollm2-moe``        SmolLM2-135M-Instruct upcycled to 8 experts, top-2; fetched and converted on first use
``smollm2-moe-e4k2``   the same with another number of experts and experts a token
``smollm2``            the dense SmolLM2-135M-Instruct
``tiny-moe``           the quickstart's model, random
``tiny:FAMILY``        a tiny random model of a supported family, with a byte tokenizer
a folder               what ``save_model`` or ``save_pretrained`` wrote
``OWNER/NAME``         a repository of the Hugging Face hub, ``OWNER/NAME@REVISION`` for a branch, tag or commit
=====================  ================================================================================================

Weights are read from safetensors only, code of a repository never runs, and a checkpoint that is already quantized is
refused unless it can be dequantized exactly: what is quantized here is quantized by us, or the formats would stack.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from tracefp4.errors import ModelError, suggest
from tracefp4.models import quickstart, smollm2
from tracefp4.models.directory import (
    LoadedModel,
    Note,
    cache_dir,
    load_directory,
    quiet,
    read_pretrained,
    save_model,
)
from tracefp4.models.tiny import FAMILIES, tiny_model
from tracefp4.models.tokenizer import VOCAB_SIZE, byte_tokenizer

__all__ = ["NAMES", "LoadedModel", "cache_dir", "load_model", "save_model"]

NAMES: tuple[str, ...] = ("smollm2-moe", "smollm2", "tiny-moe", *(f"tiny:{family}" for family in FAMILIES))
"""Built-in names."""

_MOE = re.compile(r"smollm2-moe(?:-e(?P<experts>\d{1,3})k(?P<top_k>\d{1,3}))?")
_HUB = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")


def load_model(
    name: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
    note: Note = lambda _: None,
) -> LoadedModel:
    """Load a causal language model with its tokenizer, in evaluation mode. Nothing is printed; ``note`` is told.

    Args:
        name: see the table above.
        dtype: dtype of the parameters; buffers keep theirs.
        device: where the model goes.
        seed: seed of random weights and of upcycling; other models do not depend on it.
        note: called with a sentence before a download or a conversion.

    Returns:
        Model, tokenizer and the note on where they come from.

    Raises:
        ModelError: an unknown name (with the nearest valid one), or a model that cannot be had.
    """
    with quiet():
        loaded = _resolve(str(name), dtype, seed, note)
    loaded.model.to(device)  # type: ignore[arg-type]
    kinds = {
        "parameters": sum(p.numel() for p in loaded.model.parameters()),
        "dtype": str(dtype).removeprefix("torch."),
    }
    return loaded._replace(source={**loaded.source, **kinds})


def _resolve(name: str, dtype: torch.dtype, seed: int, note: Note) -> LoadedModel:
    if name == "smollm2":
        return smollm2.dense(dtype, note=note)
    if match := _MOE.fullmatch(name):
        sizes = {key: int(value) for key, value in match.groupdict().items() if value}
        return smollm2.moe(dtype, seed=seed, note=note, **sizes)
    if name == "tiny-moe":
        return quickstart.load(seed, dtype=dtype)
    if name.startswith("tiny:"):
        return _tiny(name, dtype, seed)
    if Path(name).expanduser().is_dir():
        return load_directory(Path(name).expanduser(), dtype=dtype)
    match = _HUB.fullmatch(name)
    if match is None or name.startswith(("./", "../", "~")):
        kind = "folder" if "/" in name or name.startswith("~") else "model"
        hint = "" if kind == "folder" else f"{suggest(name, NAMES)}; a hub model is written OWNER/NAME"
        raise ModelError(f"there is no {kind} {name!r}{hint}")
    try:
        return read_pretrained(match["name"], dtype, revision=match["revision"])
    except ModelError as error:
        built_in = ", ".join(NAMES[:3])
        raise ModelError(f"{error}; without a network use a local folder or a built-in model ({built_in})") from error


def _tiny(name: str, dtype: torch.dtype, seed: int) -> LoadedModel:
    if name not in NAMES:
        raise ModelError(f"unknown tiny model {name!r}{suggest(name, [n for n in NAMES if n.startswith('tiny:')])}")
    model = tiny_model(name.removeprefix("tiny:"), seed, dtype=dtype, vocab_size=VOCAB_SIZE)
    source = {"name": name, "notes": [f"Random weights, seed {seed}: a tiny model for tests, untrained."]}
    return LoadedModel(model, byte_tokenizer(), source)
