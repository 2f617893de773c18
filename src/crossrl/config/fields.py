"""How a config field says which values it may have."""

from __future__ import annotations


def allowed(*values: str) -> dict[str, tuple[str, ...]]:
    """Metadata of a text field, or of a list of texts: the closed set of its values.

    Checked when a config is loaded, printed by ``crossrl train --help``.
    """
    return {"allowed": values}
