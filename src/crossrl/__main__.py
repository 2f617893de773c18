"""``python -m crossrl``: the ``crossrl`` command with this interpreter."""

from crossrl.cli.main import main

raise SystemExit(main())
