"""Who a run is in its exchanges: kept in the run's own folder, so that a restarted run is still the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from crossrl.files import dump_json, publish_text, read_json
from crossrl.tape.errors import ExchangeError


@dataclass(frozen=True, slots=True)
class Identity:
    """One exchange that the run is, or was, part of. ``first_step``: the step after which it began (0: at the start).

    >>> Identity("5e1f", "/tmp/verl/share_data_dir", "ckpt", 0).first_step
    0
    """

    run_id: str
    root: str
    role: str
    first_step: int


def load_identities(home: Path) -> list[Identity]:
    """Those in ``home``/share.json. Raises ``ExchangeError`` for a file that cannot be read."""
    path = home / "share.json"
    try:
        return [Identity(**each) for each in read_json(path)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        raise ExchangeError(f"{path} is not readable: {error}. Remove it to begin a new exchange") from None


def save_identities(home: Path, known: Sequence[Identity]) -> None:
    publish_text(home / "share.json", dump_json([asdict(i) for i in known]))
