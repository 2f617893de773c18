"""The program in which scoring happens: ``python -m crossrl.rewards.child READ_FD WRITE_FD PARENT_PID``.

One sample at a time: a frame with the sample in, a frame with its score out. It runs other people's code, so
it is expected to hang, exit or be killed at any time; ``workers.py`` starts another then.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import inspect
import io
import json
import math
import numbers
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crossrl.data.errors import DataError
from crossrl.data.files import plain
from crossrl.rewards import verifiers
from crossrl.rewards.protocol import HEADER_BYTES, ProtocolError, RewardError, Status, pack

Compute = Callable[[dict[str, Any]], Any]
_MODULE = "crossrl_custom_reward"
_ERROR_CHARS = 2000


def main(read_fd: int, write_fd: int, parent: int) -> None:
    """Load what the first frame asks for, answer ready or refused, then score until the pipe ends."""
    _die_with(parent)
    for fd in (read_fd, write_fd):
        os.set_inheritable(fd, False)
    os.dup2(2, 1)  # what user code prints goes where errors go; the answers have a pipe of their own
    inbox = os.fdopen(read_fd, "rb")
    try:
        compute, code = _load(_read(inbox))
    except Exception as error:
        reason = str(error) if isinstance(error, RewardError) else _describe(error)
        _write(write_fd, {"refused": reason})
        return
    _write(write_fd, {"ready": code})
    while (item := _read(inbox)) is not None:
        status, value, extra, message = score(compute, item)
        answer = {"id": item["id"], "status": status, "value": value, "extra": extra, "error": message}
        try:
            frame = pack(answer)
        except ProtocolError as error:
            frame = pack({"id": item["id"], "status": "raised", "value": None, "extra": {}, "error": str(error)})
        _write_all(write_fd, frame)


def score(compute: Compute, item: dict[str, Any]) -> tuple[Status, float | None, dict[str, Any], str | None]:
    """Score one sample: status, value (None unless ok), what else the function returned, error text."""
    # A function that draws random numbers must not depend on which samples its process saw before.
    random.seed(item["id"])
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(int.from_bytes(hashlib.sha256(item["id"].encode()).digest()[:4], "big"))
    try:
        result = compute(item)
    except BaseException as error:  # sys.exit() and KeyboardInterrupt of user code concern one sample only
        return "raised", None, {}, _describe(error)
    extra: dict[str, Any] = {}
    if isinstance(result, dict):
        if "score" not in result:
            return "wrong_type", None, {}, f"returned a dict without 'score'; its keys: {list(result)!r:.200}"
        extra = {str(key): _storable(value) for key, value in result.items() if key != "score"}
        result = result["score"]
    status, value, message = _as_number(result)
    return status, value, extra, message


def _as_number(result: Any) -> tuple[Status, float | None, str | None]:
    """A bool, a real number or an array of no dimensions becomes a float; all else says what it is."""
    shape = getattr(result, "shape", None)
    if isinstance(shape, tuple) and hasattr(result, "item"):  # NumPy and PyTorch, without importing either
        if shape != ():
            return "wrong_count", None, f"returned {math.prod(shape)} numbers (shape {tuple(shape)}) for one sample"
        result = result.item()
    if isinstance(result, (list, tuple, set)):
        return "wrong_count", None, f"returned a {type(result).__name__} of {len(result)} for one sample"
    if not isinstance(result, numbers.Real):
        return "wrong_type", None, f"returned {result!r:.200} of type {type(result).__name__}; want a number or a dict"
    try:
        value = float(result)
    except OverflowError:
        return "non_finite", None, "returned a number too large for a float"
    if not math.isfinite(value):
        return "non_finite", None, f"returned {value}"
    return "ok", value, None


def _storable(value: Any) -> Any:
    """As JSON if it can be; numbers that are not finite become None, anything else its repr."""
    if isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "tolist"):  # NumPy and PyTorch
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    try:
        return plain(value, "")
    except (DataError, RecursionError):
        return f"{value!r:.200}"


def _load(spec: dict[str, Any]) -> tuple[Compute, str]:
    """The function that scores an item, and the digest of its source. Raises ``RewardError``."""
    # At the end, so that a module next to the user's file can be imported but never hides the standard library.
    sys.path += [folder for folder in spec["sys_path"] if folder not in sys.path]
    if spec["path"]:
        return _custom(spec)
    table = {source: verifiers.prepare(source) for source in spec["sources"]}

    def compute(item: dict[str, Any]) -> Any:
        source = item["data_source"]
        if source not in table:
            raise RewardError(f"data_source {source!r} was not among those at the start: {', '.join(table)}")
        return table[source](source, item["response"], item["ground_truth"], item["extra_info"])

    return compute, _digest_of_verifiers()


def _digest_of_verifiers() -> str:
    """Of the verifiers' source, and of the versions of the packages that some of them rest on."""
    whole = hashlib.sha256(Path(verifiers.__file__).read_bytes())
    for package in ("math-verify", "reasoning-gym"):
        if package.replace("-", "_") in sys.modules:
            whole.update(f"{package}=={importlib.metadata.version(package)}".encode())
    return whole.hexdigest()


def _custom(spec: dict[str, Any]) -> tuple[Compute, str]:
    path, name, kwargs = Path(spec["path"]), spec["name"], spec["kwargs"]
    code = path.read_bytes()
    digest = hashlib.sha256(code).hexdigest()
    if spec["code"] not in (None, digest):
        raise RewardError(
            f"reward code {path} has changed while the run uses it (sha256 {spec['code'][:12]} at the start, "
            f"{digest[:12]} now); scores before and after would not be comparable. Restart the run"
        )
    sys.path.append(str(path.parent))
    module_spec = importlib.util.spec_from_file_location(_MODULE, path)
    if module_spec is None or module_spec.loader is None:
        raise RewardError(f"reward.custom_reward_function.path={path} is not a Python file (want a name ending in .py)")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[_MODULE] = module  # dataclasses and pickle look their module up by name
    try:
        exec(compile(code, str(path), "exec"), module.__dict__)  # the bytes that were hashed, not a second read
    except BaseException as error:
        raise RewardError(
            f"reward.custom_reward_function.path={path} cannot be imported: {_describe(error)}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        there = ", ".join(n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == _MODULE)
        raise RewardError(
            f"reward.custom_reward_function.name={name!r}: {path} has no such function; it has: {there or 'none'}"
        )
    try:
        inspect.signature(function).bind(data_source="", solution_str="", ground_truth="", extra_info={}, **kwargs)
    except TypeError as error:
        raise RewardError(
            f"reward function {name} in {path} cannot be called as "
            f"{name}(data_source, solution_str, ground_truth, extra_info{''.join(f', {k}' for k in kwargs)}): {error}"
        ) from error

    def compute(item: dict[str, Any]) -> Any:
        result = function(
            data_source=item["data_source"],
            solution_str=item["response"],
            ground_truth=item["ground_truth"],
            extra_info=item["extra_info"],
            **kwargs,
        )
        if inspect.iscoroutine(result):
            import asyncio

            return asyncio.run(result)
        return result

    return compute, digest


def _describe(error: BaseException) -> str:
    """The error with the line that raised it, innermost first, cut to a length that fits a log."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    try:
        text = str(error)
    except Exception:
        text = "(its message cannot be made)"
    return f"{type(error).__name__}: {text}{where}"[:_ERROR_CHARS]


def _read(inbox: io.BufferedReader) -> Any:
    header = inbox.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return None
    return json.loads(inbox.read(int.from_bytes(header, "big")))


def _write(fd: int, message: Any) -> None:
    _write_all(fd, pack(message))


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _die_with(parent: int) -> None:
    """End when the parent does, however it ends and whatever code is running here."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG in linux/prctl.h
        ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)
    else:

        def watch() -> None:
            while os.getppid() == parent:
                time.sleep(1.0)
            os.killpg(0, signal.SIGKILL)

        threading.Thread(target=watch, daemon=True).start()
    if os.getppid() != parent:  # it ended before the signal was asked for
        os._exit(1)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
