"""The tape and the exchange on an unmodified verl: ``docs/how-to/use-with-verl.md``.

verl imports this package by itself: through its entry-point group ``verl.plugins`` (from 0.9 on), or because
``VERL_USE_EXTERNAL_MODULES=crossrl.hosts.verl`` says so (all versions). Importing it anywhere else does nothing.
"""

from crossrl.hosts.verl.plugin import load

load()
