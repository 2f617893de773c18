"""Parts of a run in other processes: worker processes on this machine, or actors of a Ray cluster.

``worker.py`` says what a worker is; ``local.py`` and ``ray.py`` make them; ``host.py`` is what runs inside one.
"""
