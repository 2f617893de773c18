"""The one error of this package: a list of problems, all found before anything runs."""

from __future__ import annotations

from collections.abc import Sequence


class ConfigError(ValueError):
    """The configuration cannot be used. ``problems``: one message each, with the key, the value and what to do."""

    def __init__(self, problems: Sequence[str] | str) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        head = "the configuration has a problem:" if len(self.problems) == 1 else f"{len(self.problems)} problems:"
        super().__init__("\n".join([head, *(f"  - {p}" for p in self.problems)]))
