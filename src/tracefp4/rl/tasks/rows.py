"""Rows of JSONL and parquet files, and which of their columns mean what.

Columns are recognised by name: verl's as they are (``data_source``, ``prompt`` as a list of ``{"role", "content"}``,
``ability``, ``reward_model = {"style", "ground_truth"}``, ``extra_info``), and the usual names of prompts and answers
elsewhere. A row that cannot be used stops everything, with file and row in the message: data that is dropped silently
changes what a run means.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tracefp4.errors import TaskError
from tracefp4.rl.tasks.base import Message

PROMPT_COLUMNS = ("prompt", "question", "problem", "messages", "instruction", "query", "input")
ANSWER_COLUMNS = ("reward_model.ground_truth", "answer", "ground_truth", "label", "solution", "target", "output")
MAX_LINE_BYTES = 32 << 20
_ROLES = ("system", "user", "assistant", "tool", "developer")


def read_rows(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of a file with the place of each (``file.jsonl, line 3``).

    Args:
        path: ends in ``.jsonl``, ``.json`` (one object a line) or ``.parquet``.

    Raises:
        TaskError: unreadable file, unknown suffix, or a line that is no JSON object.
    """
    file = Path(path)
    if not file.is_file():
        raise TaskError(f"data file {path!r} does not exist")
    if file.suffix == ".parquet":
        yield from _parquet(file)
    elif file.suffix in (".jsonl", ".json", ".ndjson"):
        yield from _jsonl(file)
    else:
        raise TaskError(f"data file {path!r} is neither .jsonl nor .parquet")


def _jsonl(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with file.open("rb") as stream:
        for number, line in enumerate(iter(lambda: stream.readline(MAX_LINE_BYTES + 1), b""), start=1):
            place = f"{file}, line {number}"
            if len(line) > MAX_LINE_BYTES:
                raise TaskError(f"{place}: longer than {MAX_LINE_BYTES >> 20} MiB")
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"))
            except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
                raise TaskError(f"{place}: not JSON in UTF-8 ({error})") from error
            if not isinstance(row, dict):
                raise TaskError(f"{place}: a {type(row).__name__}, not an object with columns")
            yield place, row


def _parquet(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise TaskError("reading parquet needs pyarrow: pip install 'tracefp4[rl]'") from error
    try:
        number = 0
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{file}, row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise TaskError(f"data file {str(file)!r} cannot be read as parquet: {error}") from error


def pick_column(row: Mapping[str, Any], wanted: str, candidates: tuple[str, ...], what: str, place: str) -> str | None:
    """The column to use: the wanted one, or the first candidate that the row has; ``None`` if there is none.

    Raises:
        TaskError: a wanted column that the row lacks.
    """
    if wanted:
        if not _has(row, wanted):
            raise TaskError(f"{place}: no column {wanted!r} for the {what} (columns: {', '.join(map(str, row))})")
        return wanted
    return next((name for name in candidates if _has(row, name)), None)


def look_up(row: Mapping[str, Any], column: str, place: str) -> Any:
    """Value of a column, ``a.b`` for a field of a structure; raises :class:`TaskError` if the row lacks it."""
    if not _has(row, column):
        raise TaskError(f"{place}: column {column!r} is missing")
    value: Any = row
    for part in column.split("."):
        value = value[part]
    return value


def to_prompt(value: Any, place: str) -> str | tuple[Message, ...]:
    """A prompt from a column: text, or a conversation.

    Raises:
        TaskError: anything else, an empty prompt, an unknown role, content that is not text.
    """
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value:
        messages = []
        for turn in value:
            role, content = (turn.get("role"), turn.get("content")) if isinstance(turn, Mapping) else (None, None)
            if role not in _ROLES or not isinstance(content, str):
                raise TaskError(f"{place}: a prompt's turn must be {{'role', 'content'}} with text, got {_short(turn)}")
            messages.append(Message(role, content))
        return tuple(messages)
    raise TaskError(f"{place}: a prompt must be text or a list of turns, got {_short(value)}")


def to_answer(value: Any, place: str) -> str:
    """An answer from a column as text; numbers as written by ``str``, structures as JSON."""
    if value is None:
        raise TaskError(f"{place}: the answer is empty")
    if isinstance(value, str | int | float):
        return str(value)
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError as error:
        raise TaskError(f"{place}: an answer of type {type(value).__name__} cannot be used") from error


def _has(row: Mapping[str, Any], column: str) -> bool:
    value: Any = row
    for part in column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return False
        value = value[part]
    return True


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
