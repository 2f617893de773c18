"""Patches that CrossRL brings for other packages: ``crossrl.patching.known:PATCHES``."""

from crossrl.patching.known.vllm_ascend import SLEEP, WAKE_UP

PATCHES = (SLEEP, WAKE_UP)
