"""A model as a folder: weights as safetensors, tokenizer, and a note on where it all comes from.

A loaded model is three things, :class:`LoadedModel`: the module, its tokenizer, and ``source``, plain data that says
what the weights are and how they were made. The source is written beside the weights and travels into every result,
because "BF16 baseline" means one thing for a released checkpoint and another for a dequantized 4-bit file.

Folders are written under a temporary name and renamed when complete: a folder that exists is whole. The cache of what
is downloaded and converted lies in ``~/.cache/tracefp4``, or wherever ``TRACEFP4_CACHE`` points.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tracefp4.errors import ModelError
from tracefp4.models.packed import PACKED_FILE, read_packed, write_packed
from tracefp4.models.packing import PackedWeight

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SOURCE_FILE = "tracefp4_source.json"
"""Provenance, beside the weights."""
Note = Callable[[str], None]
"""Called with a sentence before something that takes long."""
CACHE_VARIABLE = "TRACEFP4_CACHE"
"""Environment variable that moves the cache."""


class LoadedModel(NamedTuple):
    """A model ready for use, in evaluation mode."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    source: dict[str, Any]
    """``name``, ``notes`` (sentences), and what else is known: hashes, licence, method, seed. JSON data."""


def cache_path() -> Path:
    """Where the cache folder lies, whether it exists or not: ``$TRACEFP4_CACHE``, or ``~/.cache/tracefp4``."""
    return Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/tracefp4").expanduser()


def cache_dir() -> Path:
    """The cache folder of :func:`cache_path`, created if needed.

    Raises:
        ModelError: it cannot be created.
    """
    path = cache_path()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(
            f"the cache folder {path} cannot be created ({error}); set {CACHE_VARIABLE} to another"
        ) from error
    return path


@contextmanager
def quiet() -> Iterator[None]:
    """Silence progress bars and warnings of the libraries below while a model is loaded or saved; errors still show."""
    threshold = logging.root.manager.disable
    logging.disable(max(threshold, logging.WARNING))
    try:
        from transformers.utils import logging as transformers_logging

        bars = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()
        try:
            yield
        finally:
            if bars:
                transformers_logging.enable_progress_bar()
    finally:
        logging.disable(threshold)


@contextmanager
def complete_folder(path: Path) -> Iterator[Path]:
    """Give an empty folder to write into; when the block ends well, it takes the name ``path``.

    Should another process have finished first, its folder stays and ours is thrown away.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    working = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield working
        working.chmod(0o755)
        try:
            working.rename(path)
        except OSError:
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(working, ignore_errors=True)


def cached(name: str, build: Callable[[], LoadedModel], dtype: torch.dtype) -> LoadedModel:
    """Load the model ``name`` from the cache, after ``build`` has made it if it is not there.

    Processes that find it missing at the same time all make it, each in a folder of its own, and all load what the
    first one put there: nobody serves weights that were not read back from the cache.

    Raises:
        ModelError: it cannot be written, or what lies there is no complete model.
    """
    path = cache_dir() / name
    if not path.is_dir():
        try:
            _write_model(build(), path)
        except OSError as error:
            raise ModelError(f"the model cannot be written to {path}: {error}") from error
    return load_directory(path, dtype=dtype)


def save_model(loaded: LoadedModel, directory: str | Path) -> Path:
    """Write model, tokenizer and source into a new folder that :func:`tracefp4.models.loading.load_model` reads.

    Args:
        loaded: what to write; parameters keep their dtype.
        directory: must not exist yet, or be empty.

    Raises:
        ModelError: the folder has content, or cannot be written.
    """
    path = Path(directory).expanduser().absolute()
    try:
        claim(path)
        _write_model(loaded, path)
    except OSError as error:
        raise ModelError(f"the model cannot be written to {path}: {error}") from error
    return path


def _write_model(loaded: LoadedModel, path: Path) -> None:
    with complete_folder(path) as working, quiet():
        loaded.model.save_pretrained(working)
        loaded.tokenizer.save_pretrained(working)
        text = json.dumps(loaded.source, indent=2, ensure_ascii=False)
        (working / SOURCE_FILE).write_text(text + "\n", encoding="utf-8")


def load_directory(path: Path, *, dtype: torch.dtype) -> LoadedModel:
    """Load what :func:`save_model` or ``save_pretrained`` wrote. Nothing is fetched.

    Raises:
        ModelError: no complete model lies there, or see :func:`read_pretrained`.
    """
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} is no model folder: it has no config.json")
    if (path / PACKED_FILE).is_file():
        return _load_packed(path, dtype)
    loaded = read_pretrained(str(path), dtype, local_files_only=True)
    file = path / SOURCE_FILE
    if not file.is_file():
        return loaded
    try:
        source = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} is not JSON: {first_sentence(error)}") from error
    source["notes"] = [*source.get("notes", []), *loaded.source["notes"]]
    return loaded._replace(source=source)


def _load_packed(path: Path, dtype: torch.dtype) -> LoadedModel:
    from transformers import AutoTokenizer

    with quiet():
        model, facts = read_packed(path, dtype)
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    note = f"Expert weights are stored in {facts['spec']} by method {facts['method']}; the model holds their values."
    facts = {key: value for key, value in facts.items() if key != "weights"}
    return LoadedModel(model, tokenizer, {"name": str(path), "notes": [note], "packed": str(path), **facts})


def save_packed_model(
    loaded: LoadedModel, packed: Mapping[str, PackedWeight], directory: str | Path, **written: Any
) -> Path:
    """Write a packed folder that :func:`tracefp4.models.loading.load_model` reads.

    Args:
        loaded: model and tokenizer.
        packed: codes and scales of every expert projection.
        directory: must not exist yet, or be empty.
        **written: ``spec``, ``numerics`` and ``facts`` of :func:`tracefp4.models.packed.write_packed`.

    Raises:
        ModelError: the folder has content, or cannot be written.
    """
    path = Path(directory).expanduser().absolute()
    claim(path)
    try:
        with complete_folder(path) as working, quiet():
            loaded.model.config.save_pretrained(working)
            loaded.tokenizer.save_pretrained(working)
            write_packed(loaded.model, packed, working, **written)
    except OSError as error:
        raise ModelError(f"the model cannot be written to {path}: {error}") from error
    return path


def claim(path: Path) -> None:
    """Refuse a folder with content; remove an empty one, which the finished folder will replace.

    Raises:
        ModelError: it has content.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ModelError(f"{path} exists already; choose a new folder")
    if path.is_dir():
        path.rmdir()


def read_pretrained(name: str, dtype: torch.dtype, **options: Any) -> LoadedModel:
    """Read a checkpoint of transformers, from the hub or a folder. No code of it runs, and no pickle is opened.

    Args:
        name: repository or folder.
        dtype: dtype of the parameters.
        **options: passed to each ``from_pretrained`` (``revision``, ``local_files_only``).

    Raises:
        ModelError: it cannot be read, has no safetensors, needs code of its own, or is stored quantized.
    """
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    options["trust_remote_code"] = False
    try:
        with quiet():
            config = AutoConfig.from_pretrained(name, **options)
            # The commit of the configuration, so that a branch that moves meanwhile cannot mix two versions.
            commit = getattr(config, "_commit_hash", None)
            options["revision"] = commit or options.get("revision")
            extra, notes = _dequantization(name, config)
            result: Any = AutoModelForCausalLM.from_pretrained(
                name, dtype=dtype, use_safetensors=True, output_loading_info=True, **options, **extra
            )
            tokenizer = AutoTokenizer.from_pretrained(name, **options)
    except ModelError:
        raise
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"model {name!r} cannot be loaded: {first_sentence(error)}") from error
    model, report = result
    # transformers fills what a checkpoint lacks with random numbers and only warns.
    if lacking := sorted(report["missing_keys"]) or sorted(str(key) for key in report["mismatched_keys"]):
        raise ModelError(
            f"model {name!r} lacks {len(lacking)} weights of its class, the first of which is {lacking[0]}"
        )
    if unused := sorted(report["unexpected_keys"]):
        notes.append(f"{len(unused)} tensors of the checkpoint are not used, the first of which is {unused[0]}.")
    source = {"name": name, "notes": notes, **({"revision": commit} if commit else {})}
    return LoadedModel(model.eval(), tokenizer, source)


def _dequantization(name: str, config: Any) -> tuple[dict[str, Any], list[str]]:
    """Options for a checkpoint that is stored quantized; refuses what cannot be restored exactly."""
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        return {}, []
    method = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", None)
    if method != "mxfp4":
        raise ModelError(f"model {name!r} is stored quantized ({method}); take its BF16 checkpoint")
    from transformers.utils.quantization_config import Mxfp4Config

    note = "The experts are stored in MXFP4 and were dequantized, so BF16 here means BF16 of a 4-bit checkpoint."
    return {"quantization_config": Mxfp4Config(dequantize=True)}, [note]


def first_sentence(error: BaseException) -> str:
    """The first line of an error's message, without its full stop."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(". ")
