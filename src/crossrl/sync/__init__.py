"""Weights from a trainer to engines in other processes, so that they provably arrive.

``sender.WeightSender`` and ``receiver.WeightReceiver`` are the two ends; ``docs/reference/weight-transfer.md`` is the
protocol between them.
"""
