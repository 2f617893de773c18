"""What differs between verl's two trainers, for the session: how they generate, and where their data lie."""

from __future__ import annotations

from typing import Any, Protocol

from crossrl.batch import Batch


class Adapter(Protocol):
    """``args`` and ``kwargs``: those of verl's ``_update_actor``; ``result``: what it returned."""

    def attach(self, *args: Any) -> tuple[Any, ...]:
        """Put ours in the place of the trainer's parts that generate; returns ``fit``'s arguments to be used."""
        ...

    def detach(self) -> None:
        """Put them back."""
        ...

    def visible(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
        """All that the step has computed before the update, by ``Session.computed``."""
        ...

    def metrics(self, result: Any, kwargs: dict[str, Any]) -> dict[str, float]: ...

    def stand_in(self, args: tuple[Any, ...], kwargs: dict[str, Any], metrics: dict[str, float]) -> Any:
        """What ``_update_actor`` would have returned, for an update that another run made."""
        ...
