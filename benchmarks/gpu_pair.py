"""Two processes that share a device, one sending weights to the other: what ``gpu_parts.py`` measures with."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.multiprocessing as mp

from crossrl.models.digest import combined, tensor_digests
from crossrl.sync.cuda_ipc import CudaBuffer
from crossrl.sync.manifest import Manifest
from crossrl.sync.messages import SyncError
from crossrl.sync.receiver import WeightReceiver
from crossrl.sync.sender import WeightSender
from crossrl.sync.shared_memory import SharedBuffer
from crossrl.sync.target import HeldTensors

MIB = 1 << 20


class Device:
    """Where a part runs, and how it is asked about time and memory."""

    def __init__(self, rehearse: bool) -> None:
        self.name, self.cuda = ("cpu", False) if rehearse else ("cuda", True)
        self.make_buffer: Any = CudaBuffer.create if self.cuda else SharedBuffer.create

    def seconds(self, work: Callable[[], Any], rounds: int = 5) -> float:
        """Median of ``rounds`` after one that is not counted; all of the device's work included."""
        found = []
        for _ in range(rounds + 1):
            self.wait()
            start = time.perf_counter()
            work()
            self.wait()
            found.append(time.perf_counter() - start)
        return statistics.median(found[1:])

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def memory(self) -> dict[str, float]:
        """MiB: of this process by PyTorch's allocator, and free on the whole device."""
        if not self.cuda:
            return {"allocated": 0.0, "reserved": 0.0, "free": 0.0}
        free, _ = torch.cuda.mem_get_info()
        found = {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved(), "free": free}
        return {key: value / MIB for key, value in found.items()}


def weights(gib: float, device: str, fill: bool = True) -> dict[str, torch.Tensor]:
    """bfloat16 tensors as a decoder has them, ``gib`` GiB in all."""
    width = 4096 if gib >= 0.5 else 256
    shapes: dict[str, tuple[int, ...]] = {"embed": (int(gib * 2**29) // 8 // width, width)}
    left, layer = int(gib * 2**29) * 7 // 8, 0
    kinds = {"norm": (width,), "q": (width, width), "kv": (width // 2, width), "o": (width, width),
             "up": (5 * width, width), "down": (width, 5 * width // 2)}  # fmt: skip
    each = sum(torch.Size(s).numel() for s in kinds.values())
    while left >= each or not layer:
        shapes |= {f"layers.{layer}.{kind}": shape for kind, shape in kinds.items()}
        left, layer = left - each, layer + 1
    made = {name: torch.zeros(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()}
    return {name: t.normal_() for name, t in made.items()} if fill else made


class Dying(HeldTensors):
    """The receiver's process ends in the middle of a transfer, as by kill -9."""

    def load_part(self, name: str, shape: tuple[int, ...], start: int, values: torch.Tensor) -> None:
        os._exit(9)


class Refusing(HeldTensors):
    def load_part(self, name: str, shape: tuple[int, ...], start: int, values: torch.Tensor) -> None:
        raise RuntimeError("the engine refuses it")


def receive(settings: Mapping[str, Any], gib: float, addresses: Mapping[str, str], kind: str, pipe: Any) -> None:
    """The receiver's process: does what ``pipe`` asks for."""
    gc.disable()
    device = Device(settings["rehearse"])
    held = weights(gib, device.name, fill=False)
    target = {"dying": Dying, "refusing": Refusing}.get(kind, HeldTensors)(held)
    receivers = {key: WeightReceiver(address, "engine", target) for key, address in addresses.items()}
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        if asked == "memory":
            pipe.send(device.memory())
        elif asked == "digest":
            pipe.send(combined(tensor_digests(held.items())))
        else:
            try:
                receivers[asked].receive()
                pipe.send("received")
            except SyncError as error:
                pipe.send(str(error))
    for receiver in receivers.values():
        receiver.close()


class Pair:
    """This process as the sender of ``gib`` GiB, and a receiver of its own. ``ways``: name to options of the sender."""

    def __init__(self, settings: Mapping[str, Any], gib: float, ways: Mapping[str, Mapping[str, Any]]) -> None:
        self.settings, self.gib, self.device = settings, gib, Device(settings["rehearse"])
        self.weights = weights(gib, self.device.name)
        self.bytes = sum(t.nbytes for t in self.weights.values())
        self.manifest = Manifest.of(self.weights.items())
        make = self.device.make_buffer
        self.senders = {
            way: WeightSender(["engine"], make_buffer=make, limit_s=20.0, **opts) for way, opts in ways.items()
        }
        self.version = 0
        self.process: Any = None

    def start(self, kind: str = "") -> None:
        """A receiver; the one before, if any, must have ended."""
        context = mp.get_context("spawn")
        self.pipe, other = context.Pipe()
        addresses = {way: sender.address for way, sender in self.senders.items()}
        self.process = context.Process(
            target=receive, args=(self.settings, self.gib, addresses, kind, other), daemon=True
        )
        self.process.start()
        self.answer("ready")

    def sync(self, way: str) -> float:
        """Seconds of one transfer of changed weights, until both sides have let go."""
        self.version += 1
        for tensor in self.weights.values():
            tensor.view(-1)[:1] = self.version % 256
        self.pipe.send(way)
        time.sleep(0.05)  # it is waiting then
        self.device.wait()
        start = time.perf_counter()
        self.senders[way].send(self.version, self.manifest, self.weights.items())
        seconds = time.perf_counter() - start
        self.answer("received")
        return seconds

    def fails(self, way: str) -> str:
        """Why a transfer failed that cannot succeed; "" if it did succeed."""
        try:
            self.sync(way)
        except SyncError as error:
            return str(error)
        return ""

    def ask(self, what: str) -> Any:
        self.pipe.send(what)
        return self.answer()

    def answer(self, want: str = "") -> Any:
        if not self.pipe.poll(60):
            raise RuntimeError("the receiver's process did not answer for 60 s")
        found = self.pipe.recv()
        if want and found != want:
            raise RuntimeError(f"the receiver says {found!r}, want {want!r}")
        return found

    def end(self) -> None:
        if self.process is not None and self.process.is_alive():
            self.pipe.send(None)
            self.process.join(20)
            self.process.kill()

    def close(self) -> None:
        self.end()
        for sender in self.senders.values():
            sender.close()
