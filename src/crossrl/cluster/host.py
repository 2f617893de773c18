"""What runs inside a worker process: makes the object, calls its methods, turns errors into words."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    """``error``: "" or what was raised, as a user should read it."""

    value: Any = None
    error: str = ""


class Host:
    """Holds the object that ``make`` brought forth; everything that it raises comes back as an ``Answer``."""

    def __init__(self) -> None:
        self.object: Any = None

    def make(self, factory: str, args: tuple[Any, ...]) -> Answer:
        """The object is ``factory(*args)``; the answer's value says which process this is."""

        def run() -> str:
            print(f"{process()}: {factory}", flush=True)  # the first line of its log
            module, _, name = factory.partition(":")
            self.object = getattr(importlib.import_module(module), name)(*args)
            return process()

        return answer(run)

    def call(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        progress: Callable[[int, int], None] | None = None,
    ) -> Answer:
        more = dict(kwargs) | ({"progress": progress} if progress else {})
        return answer(lambda: getattr(self.object, method)(*args, **more))

    def close(self) -> None:
        close = getattr(self.object, "close", None)
        if close is not None:
            close()


def process() -> str:
    """This one, as messages name it."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def answer(run: Callable[[], Any]) -> Answer:
    try:
        return Answer(run())
    except Exception as error:
        # Errors of our own are written for users; of any other the kind belongs to the message.
        ours = type(error).__module__.startswith("crossrl.")
        words = str(error) if ours and str(error) else f"{type(error).__name__}: {error}"
        return Answer(error=words)
