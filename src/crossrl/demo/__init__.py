"""The demo: a task, a small model that half knows it, and the files that a run needs."""
