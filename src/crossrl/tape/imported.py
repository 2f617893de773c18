"""What a reader must say of a record that was imported from another program's dump: what it has not, what it is not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crossrl.tape.header import Header

SAMPLED = ("as sampled", "not in this dump")  # token ids of which nothing need be said


def notes(header: Header) -> list[str]:
    """Sentences for people, the same for all records of a dump but for what is peculiar to one; none for our own.

    >>> notes(Header(run_id="r", stage="rollout", step=1))
    []
    """
    origin = header.info.get("imported")
    if not isinstance(origin, Mapping):
        return []
    found = [f"imported from {origin.get('form', 'another program')}"]
    missing = origin.get("not_in_this_dump")
    if isinstance(missing, list) and missing:
        found[0] += f"; not in this dump: {', '.join(map(str, missing))}"
    if "token_ids" in origin and origin["token_ids"] not in SAMPLED:
        found.append(f"token ids are {origin['token_ids']}")
    place: Any = origin.get("path")
    if isinstance(place, Mapping) and place.get("cut"):
        found.append(f"step {header.step}: {place.get('file')} was cut off ({place['cut']}): samples may be missing")
    return found
