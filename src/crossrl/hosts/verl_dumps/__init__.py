"""verl's own dumps as a tape of ours: ``crossrl import verl``, ``docs/how-to/import-verl-dumps.md``.

Apart from ``hosts.verl``, which verl imports by itself: nothing here runs inside verl.
"""
