"""What the tape and the exchange are made with, from the settings of a run of verl."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from crossrl.hosts.verl.settings import Settings
from crossrl.tape.exchange import Exchange
from crossrl.tape.layout import SkipLayout
from crossrl.tape.session import step_range
from crossrl.tape.tape import TapeOptions


def exchange_of(
    settings: Settings, agreement: Callable[[], Mapping[str, Any]], weights: Callable[[], str]
) -> Exchange | None:  # fmt: skip
    """None without ``trainer.share_data``."""
    if settings.share is None:
        return None
    return Exchange(
        settings.share_dir, settings.share, settings.home.absolute(), agreement(), weights, settings.timeout_s,
        settings.heartbeat_s, settings.keep,
    )  # fmt: skip


def skip_layout(settings: Settings, config: Any) -> SkipLayout | None:
    """None without rollout skip. ``config``: verl's."""
    if settings.skip_dir is None:
        return None
    return SkipLayout(
        settings.skip_dir, config.trainer.experiment_name, config.trainer.project_name,
        config.data.get("gen_batch_size") or config.data.train_batch_size, config.actor_rollout_ref.rollout.n,
    )  # fmt: skip


def options_of(settings: Settings) -> TapeOptions:
    tape = settings.tape
    return TapeOptions(
        accept=tuple(tape.accept), steps=step_range(tape.steps), keep=tape.keep, max_bytes=tape.max_bytes,
        unstorable="refuse" if tape.unstorable == "refuse" else "leave_out", wait_s=settings.timeout_s,
    )  # fmt: skip
