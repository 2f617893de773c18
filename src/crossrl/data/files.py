"""Data files to plain records: parquet, JSON Lines, JSON; each record with the place it came from.

A record is a dict from column name to JSON-like values. What JSON cannot hold is an error here, because
every later stage stores these values (records, rewards in child processes, digests).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from crossrl.data.errors import DataError

# Columns with media: reading only the text of such rows would train a blind model without saying so.
MEDIA_COLUMNS = ("images", "videos", "audios")


def read_records(path: str, required: Sequence[str], optional: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """``(place, record)`` for each row of one file; ``place`` reads "FILE row 3" (from 0, in the file's order).

    Of other columns than ``required`` and ``optional``, only those with media are read. Raises ``DataError``:
    no such file, unknown type, not what its name says, a required column is missing.
    """
    file = Path(path).expanduser()
    if not file.exists():
        raise DataError(f"data file {path!r} does not exist (looked for {file.absolute()}); files must be local")
    if not file.is_file():
        raise DataError(f"data file {path!r} is not a file; name the files in it, as a list")
    wanted = {*required, *optional, *MEDIA_COLUMNS}
    if file.suffix == ".parquet":
        return _parquet(file, required, wanted)
    if file.suffix in (".jsonl", ".json"):
        return _json(file, required, wanted)
    raise DataError(
        f"data file {path!r}: unknown type {file.suffix!r}; want .parquet, .jsonl, .json, or reasoning_gym:NAME"
    )


def plain(value: Any, place: str) -> Any:
    """``value`` as JSON-like Python values; NumPy scalars and arrays become numbers and lists.

    Raises ``DataError`` that starts with ``place`` and the path within the value for what JSON cannot hold:
    bytes, dates, numbers that are not finite, maps whose keys are not strings.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise DataError(f"{place}: {value} is not a finite number and cannot be stored as JSON")
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise DataError(f"{place}: the key {key!r} is not a string, so the map cannot be stored as JSON")
        return {key: plain(item, f"{place}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{place}[{i}]") for i, item in enumerate(value)]
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return plain(value.tolist(), place)
    raise DataError(
        f"{place}: a {type(value).__name__} cannot be stored as JSON; write it as a string, number, list or map"
    )


def _parquet(file: Path, required: Sequence[str], wanted: set[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as parquet:
            names = parquet.schema_arrow.names
            _check_columns(str(file), names, required)
            row = 0
            for batch in parquet.iter_batches(columns=[name for name in names if name in wanted]):
                types = {field.name: field.type for field in batch.schema}
                for record in batch.to_pylist():
                    yield f"{file} row {row}", {name: _maps(value, types[name]) for name, value in record.items()}
                    row += 1
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"data file {str(file)!r} cannot be read as parquet: {error}") from error


def _maps(value: Any, kind: Any) -> Any:
    """Arrow gives a map as a list of pairs; the schema says which lists are maps."""
    import pyarrow as pa

    if value is None:
        return None
    if pa.types.is_map(kind):
        return {key: _maps(item, kind.item_type) for key, item in value}
    if pa.types.is_struct(kind):
        return {field.name: _maps(value[field.name], field.type) for field in kind}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return [_maps(item, kind.value_type) for item in value]
    return value


def _json(file: Path, required: Sequence[str], wanted: set[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data file {str(file)!r} cannot be read as UTF-8 text: {error}") from error
    if file.suffix == ".json" and text.lstrip().startswith("["):
        records = [(f"{file} row {i}", record) for i, record in enumerate(_parse(text, str(file)))]
    else:
        # Not splitlines(): it also splits at characters that JSON allows inside strings (U+2028 and others).
        lines = [(i, line) for i, line in enumerate(text.split("\n")) if line.strip()]
        records = [(f"{file} row {row} (line {i + 1})", line) for row, (i, line) in enumerate(lines)]
    for place, record in records:
        record = _parse(record, place) if isinstance(record, str) else record
        if not isinstance(record, dict):
            raise DataError(f"{place}: want a JSON object with columns, found a {type(record).__name__}")
        _check_columns(place, record, required)
        yield place, {name: value for name, value in record.items() if name in wanted}


def _check_columns(place: str, present: Iterable[str], required: Sequence[str]) -> None:
    present = list(present)
    for column in required:
        if column not in present:
            raise DataError(
                f"{place}: no column {column!r}; there are: {', '.join(present) or 'none'}. Rename it in the file; "
                f"the prompt's and the source's can also be named by data.prompt_key and data.reward_fn_key"
            )


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{place}: not valid JSON: {error}") from error
