"""reasoning-gym data sets (procedural tasks with their own scorers) as rows, and back, for scoring.

A spec names a data set and its settings: ``reasoning_gym:chain_sum?min_terms=2&max_terms=3&size=200&seed=7``.
``/`` and ``:`` may stand for ``?``, ``&`` and ``=``, for command lines where those would need quotes:
``reasoning_gym:chain_sum/min_terms:2/max_terms:3``.

Item i is drawn by reasoning-gym from ``seed + i``: seeds that are nearer to each other than ``size`` share
items. That is why the default seeds of training and validation are far apart.

What the scorer needs travels in ``extra_info["reasoning_gym"]``: name, config and the entry, as JSON text in
which tuples are marked, because some scorers compare tuples. A row is scored from that alone.

Run as a program, this module generates the rows: five of the data sets walk over Python sets, so their items
depend on the hash seed of the process, which can only be set when a process starts.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crossrl.data.errors import DataError

PREFIX = "reasoning_gym:"
TRAIN_SEED = 0
VAL_SEED = 1_000_000_007
GENERATION_LIMIT_S = 1800.0


def is_spec(name: str) -> bool:
    return name.startswith(PREFIX)


def parse_spec(spec: str, default_seed: int) -> tuple[str, dict[str, Any]]:
    """The data set's name and its settings; values are JSON where they can be, else strings."""
    name, *pairs = spec.removeprefix(PREFIX).replace("?", "/").replace("&", "/").split("/")
    config: dict[str, Any] = {"seed": default_seed}
    for pair in pairs:
        key, found, text = pair.replace("=", ":", 1).partition(":")
        if not found or not key:
            raise DataError(f"{spec!r}: {pair!r} is not key=value")
        try:
            config[key] = json.loads(text)
        except ValueError:
            config[key] = text
    if not name:
        raise DataError(f"{spec!r} names no data set; write for example reasoning_gym:chain_sum?size=200")
    return name, config


def read_records(spec: str, default_seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """``(place, record)`` for each item, in verl's row schema, generated in a process of its own.

    Waits for that process, at most ``GENERATION_LIMIT_S``. Raises ``DataError``: package missing, unknown
    data set or setting, generation failed.
    """
    name, config = parse_spec(spec, default_seed)
    with tempfile.TemporaryDirectory(prefix="crossrl-reasoning-") as folder:
        out = Path(folder) / "rows.json"
        here = str(Path(__file__).parents[2])  # the child must find this very package, installed or not
        path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": path}
        command = [sys.executable, "-P", "-m", "crossrl.data.reasoning", name, json.dumps(config), str(out)]
        try:
            done = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=GENERATION_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            raise DataError(f"{spec!r}: generating the rows took more than {GENERATION_LIMIT_S:.0f} s") from None
        if done.returncode != 0:
            tail = done.stderr.decode(errors="replace")[-2000:]
            raise DataError(f"{spec!r}: generating the rows failed (exit code {done.returncode}):\n{tail}")
        answer = json.loads(out.read_text(encoding="utf-8"))
    if "error" in answer:
        raise DataError(f"{spec!r}: {answer['error']}")
    for i, record in enumerate(answer["records"]):
        yield f"{spec} row {i}", record


def build(name: str, config: dict[str, Any]) -> Any:
    """The reasoning-gym data set ``name`` with ``config`` (JSON-like). Raises ``DataError``."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise DataError(
            f"reasoning-gym cannot be imported ({error}); install it with: pip install 'crossrl[tasks]'"
        ) from error
    if name not in DATASETS:
        import difflib

        near = difflib.get_close_matches(name, DATASETS, n=3) or sorted(DATASETS)
        raise DataError(f"reasoning-gym has no data set {name!r}; there is: {', '.join(near)}")
    fields = {f.name: f for f in dataclasses.fields(DATASETS[name][1])}
    unknown = sorted(set(config) - set(fields))
    if unknown:
        raise DataError(f"{name} has no setting {unknown[0]!r}; it has: {', '.join(fields)}")
    config = {k: tuple(v) if isinstance(v, list) and isinstance(fields[k].default, tuple) else v
              for k, v in config.items()}  # fmt: skip
    try:
        return reasoning_gym.create_dataset(name, **config)
    except Exception as error:  # the settings are checked by bare assertions and by whatever breaks
        raise DataError(f"{name} refuses the settings {config}: {type(error).__name__}: {error}") from error


def encode_entry(value: Any) -> Any:
    """JSON-like form that ``decode_entry`` takes back to an equal value of the same types."""
    if isinstance(value, tuple):
        return {"__tuple__": [encode_entry(item) for item in value]}
    if isinstance(value, list):
        return [encode_entry(item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("__") for key in value):
            return {key: encode_entry(item) for key, item in value.items()}
        return {"__map__": [[encode_entry(key), encode_entry(item)] for key, item in value.items()]}
    return value


def decode_entry(value: Any) -> Any:
    """The inverse of ``encode_entry``."""
    if isinstance(value, list):
        return [decode_entry(item) for item in value]
    if isinstance(value, dict):
        if "__tuple__" in value:
            return tuple(decode_entry(item) for item in value["__tuple__"])
        if "__map__" in value:
            return {decode_entry(key): decode_entry(item) for key, item in value["__map__"]}
        return {key: decode_entry(item) for key, item in value.items()}
    return value


def _record(name: str, config: dict[str, Any], entry: dict[str, Any], place: str) -> dict[str, Any]:
    try:
        text = json.dumps(encode_entry(entry), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataError(f"{place}: the entry cannot be stored as JSON ({error}); it cannot be used here") from error
    if decode_entry(json.loads(text)) != entry:
        raise DataError(f"{place}: the entry does not come back from JSON unchanged; it cannot be used here")
    return {
        "prompt": [{"role": "user", "content": entry["question"]}],
        "data_source": PREFIX + name,
        "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
        "extra_info": {"reasoning_gym": {"name": name, "config": config, "entry": text}},
    }


def main(name: str, config_text: str, out: str) -> None:
    config = json.loads(config_text)
    try:
        dataset = build(name, config)
        records = [_record(name, config, dataset[i], f"{name} item {i}") for i in range(len(dataset))]
        answer: dict[str, Any] = {"records": records}
    except DataError as error:
        answer = {"error": str(error)}
    Path(out).write_text(json.dumps(answer, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
