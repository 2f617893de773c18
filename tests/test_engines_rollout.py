"""Promises of the embedded rollout engine."""
