"""RL post-training whose every stage can be recorded, replayed, swapped with another run's, and cross-examined."""

__version__ = "0.1.0"
