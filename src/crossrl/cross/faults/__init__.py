"""Planted faults: a catalogue of named faults that the cross-examination must attribute rightly.

    crossrl faults list
    crossrl train ... cross.plant=inference.stale_weights@3

A file for each part of a run; each fault is a function that changes one seam of one run.
"""

from crossrl.cross.faults.base import Fault, FaultError, Harmless
from crossrl.cross.faults.catalogue import (
    FAULTS,
    HARMLESS,
    Planted,
    chosen,
    parse,
    plant,
    plant_in_engine,
    select,
    warning,
)

__all__ = [
    "FAULTS",
    "HARMLESS",
    "Fault",
    "FaultError",
    "Harmless",
    "Planted",
    "chosen",
    "parse",
    "plant",
    "plant_in_engine",
    "select",
    "warning",
]
