"""Attaching to other trainers: they stay as they are; their steps are recorded, replayed and exchanged like ours."""
