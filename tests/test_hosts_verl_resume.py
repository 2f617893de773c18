"""The verl host in runs that are killed and started again: real sessions, tapes, exchanges and checkpoints around a
trainer that is verl's as far as the session sees it. With real verl: examples/verl/run.py, parts killed and resumed."""

from __future__ import annotations

import json
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from crossrl.batch import Batch, Ragged
from crossrl.config.tape import TapeConfig
from crossrl.hosts.verl.errors import HostError
from crossrl.hosts.verl.padded import described
from crossrl.hosts.verl.prompts import samples
from crossrl.hosts.verl.session import Session
from crossrl.hosts.verl.settings import Settings
from crossrl.tape import diff_runs
from crossrl.tape.errors import PeerLost

STEPS, PROMPTS, N = 3, 2, 2


class Killed(BaseException):
    """In the place of SIGKILL: nothing of the session is closed."""


class Tokenizer:
    eos_token_id, chat_template = 1, ""

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0}

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, ids))


class Trainer:
    """``kill``: raises ``Killed`` at one of its points, which are named by the step: ``generate 2``, ``update 2``,
    ``updated 2``, ``save 2``. ``saves``: whether it has checkpoints; ``generated``: how often it generated."""

    def __init__(self, root: Path, name: str, saves: bool, kill: str) -> None:
        self.home, self.saves, self.kill = root / name, saves, kill
        self.home.mkdir(exist_ok=True)
        self.config = OmegaConf.create({
            "trainer": {"experiment_name": "e", "project_name": "p", "device": "cpu", "nnodes": 1,
                        "n_gpus_per_node": 1, "default_local_dir": str(self.home), "total_training_steps": None},
            "data": {"train_files": str(root / "data"), "train_batch_size": PROMPTS}, "algorithm": {}, "reward": {},
            "actor_rollout_ref": {
                "model": {"path": str(root)}, "actor": {"strategy": "fsdp2"},
                "rollout": {"n": N, "name": "x", "dtype": "float32", "temperature": 1.0, "top_k": -1, "top_p": 1.0,
                            "response_length": 4, "calculate_log_probs": False}},
        })  # fmt: skip
        self.tokenizer, self.total_training_steps, self.steps_per_epoch = Tokenizer(), STEPS, STEPS
        self.global_steps = self.generated = 0
        self.module = torch.nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            self.module.weight.copy_(torch.tensor([[1.0, 2.0]]))
        self.module.requires_grad_(False)
        manager = types.SimpleNamespace(previous_saved_paths=[])
        engine = types.SimpleNamespace(module=self.module, checkpoint_manager=manager)
        self.worker = types.SimpleNamespace(
            worker_dict={"": types.SimpleNamespace(actor=types.SimpleNamespace(engine=engine))}
        )
        self.actor_rollout_wg = self
        self.session: Session

    def save_checkpoint(self, path: str, hdfs: None, step: int, max_ckpt_to_keep: None) -> None:
        torch.save(self.module.state_dict(), Path(path, "model.pt"))

    def load_checkpoint(self, path: str, hdfs: None = None, del_local_after_load: bool = False) -> None:
        self.module.load_state_dict(torch.load(Path(path, "model.pt")))

    def _save_checkpoint(self) -> None:
        self.at("save")
        folder = self.home / f"global_step_{self.global_steps}"
        folder.mkdir()
        self.save_checkpoint(str(folder), None, self.global_steps, None)
        (self.home / "latest").write_text(str(self.global_steps))

    def at(self, point: str) -> None:
        if self.kill == f"{point} {self.global_steps}":
            raise Killed

    def fit(self) -> None:
        if (self.home / "latest").exists():
            self.global_steps = int((self.home / "latest").read_text())
            self.load_checkpoint(str(self.home / f"global_step_{self.global_steps}"))
        while self.global_steps < STEPS:
            self.global_steps += 1
            rows = [{"uid": "", "raw_prompt": [{"content": f"{self.global_steps}.{i}"}]} for i in range(PROMPTS)]
            given = samples(rows, N, 0)
            batch = self.session.rollout(given, lambda given=given: (self.generate(given),) * 2, lambda found: found)
            self.session.update(lambda batch=batch: self.train(batch), batch)
            self.at("updated")
            if self.saves:
                self._save_checkpoint()

    def generate(self, given: Batch) -> Batch:
        self.at("generate")
        self.generated += 1
        level = int(self.module.weight.sum() * 10) % 50
        ids = [[2 + level + i, 1] for i in range(len(given))]
        columns = {"prompt_ids": Ragged.from_rows([[9]] * len(ids), np.int32),
                   "response_ids": Ragged.from_rows(ids, np.int32),
                   "response_mask": Ragged.from_rows([[1, 1]] * len(ids), np.uint8)}  # fmt: skip
        return described(
            given.sample_id, columns, *self.session.reading(), [self.global_steps - 1] * len(ids), [{}] * len(ids), {}
        )

    def train(self, batch: Batch) -> dict[str, float]:
        self.at("update")
        with torch.no_grad():
            self.module.weight += float(batch.ragged("response_ids").values.sum()) / 100
        return {"actor/loss": float(self.module.weight.sum())}


class Adapter:
    def __init__(self, session: Session) -> None:
        self.session = session

    def attach(self, *args: Any) -> tuple[Any, ...]:
        return args

    def detach(self) -> None: ...

    def visible(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
        batch, count = args[0], len(args[0])
        scores = np.arange(count, dtype=np.float64)
        more = {"score": scores, "reward": scores, "reward_status": ["ok"] * count, "reward_extra": [{}] * count}
        kept = {name: batch[name] for name in ("response", "response_ids")}
        return Batch(batch.sample_id, {**kept, **more})

    def metrics(self, result: Any, kwargs: dict[str, Any]) -> dict[str, float]:
        return dict(result)

    def stand_in(self, args: tuple[Any, ...], kwargs: dict[str, Any], metrics: dict[str, float]) -> Any:
        return metrics


class Played(Session):
    def ask(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return [function(self.trainer.worker, *args)]

    def _adapter(self) -> Any:
        return Adapter(self)

    def vanish(self) -> None:
        """What SIGKILL leaves of this side: no beat, no lock, nothing said; records that were not written are lost."""
        writer = self.tape._writer
        with writer._changed:
            while writer._queue:
                writer._in_flight -= writer._queue.pop()[1].nbytes
        writer.flush()  # the one at hand
        self.rows.close()
        if self.exchange is not None and self.exchange._open:
            self.exchange._heart.stop()
            self.exchange._lock.close()


def run(
    root: Path, name: str, share: str | None = None, skip: Path | None = None, saves: bool = True, kill: str = "",
    keep: int | None = None,
) -> Trainer:  # fmt: skip
    """Run verl's ``fit`` with a session, as the patches do. Raises what the run raises."""
    trainer = Trainer(root, name, saves, kill)
    settings = Settings(
        TapeConfig(mode="record"), skip, share, root / "shared", 20.0, 20.0, keep, trainer.home, False  # type: ignore[arg-type]
    )  # fmt: skip
    return play(trainer, Played(trainer, settings))


def play(trainer: Trainer, session: Played) -> Trainer:
    """``fit`` with ``session`` around it. Raises what the run raises."""
    trainer.session = session
    try:
        session.preflight()
        session.attach()
        trainer.fit()
    except Killed:
        session.vanish()
        raise
    except BaseException as error:
        session.close(error)
        raise
    session.close(None)
    return trainer


def pair(root: Path, infers: dict[str, Any], trains: dict[str, Any]) -> dict[str, Trainer | BaseException]:
    """Both sides of an exchange, at the same time; each one's trainer, or what it raised."""
    found: dict[str, Trainer | BaseException] = {}

    def side(role: str, keys: dict[str, Any]) -> None:
        try:
            found[role] = run(root, role, share=role, **keys)
        except BaseException as error:
            found[role] = error

    threads = [threading.Thread(target=side, args=each) for each in (("ckpt", infers), ("rollout", trains))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert set(found) == {"ckpt", "rollout"}, "a side hangs"
    return found


@pytest.fixture(autouse=True)
def files(tmp_path: Path) -> None:
    """A model's configuration and data, of which the session makes digests."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    (tmp_path / "data").write_text("rows")


@pytest.fixture
def alone(tmp_path: Path) -> Trainer:
    return run(tmp_path, "alone")


def same(a: Trainer, b: Trainer | Path) -> None:
    """Equal weights and records, and every step once in the metrics."""
    home = b if isinstance(b, Path) else b.home
    diff = diff_runs(a.home / "tape", home / "tape")
    assert diff.exit_code == 0, diff.to_json()
    rows = [json.loads(line)["step"] for line in (home / "metrics.jsonl").read_text().splitlines()]
    assert rows == [1, 2, 3]
    if isinstance(b, Trainer):
        assert torch.equal(a.module.weight, b.module.weight)


POINTS = ["generate 2", "update 2", "updated 2", "save 2", "updated 3"]


@pytest.mark.parametrize("kill", POINTS)
def test_a_taped_run_that_was_killed_goes_on_at_its_checkpoint(tmp_path, alone, kill):
    with pytest.raises(Killed):
        run(tmp_path, "cut", kill=kill)
    resumed = run(tmp_path, "cut")
    same(alone, resumed)
    assert resumed.generated == STEPS + 1 - int(kill[-1])


def test_without_a_checkpoint_all_records_are_made_again(tmp_path, alone):
    with pytest.raises(Killed):
        run(tmp_path, "cut", saves=False, kill="updated 2")
    resumed = run(tmp_path, "cut", saves=False)
    same(alone, resumed)
    assert resumed.generated == STEPS


def test_after_a_kill_rollout_skip_has_every_step_once(tmp_path, alone):
    with pytest.raises(Killed):
        run(tmp_path, "cut", skip=tmp_path / "dump", kill="save 2")
    resumed = run(tmp_path, "cut", skip=tmp_path / "dump")
    same(alone, resumed)
    assert resumed.generated == 1, "the second step's was stored before the kill"
    third = run(tmp_path, "third", skip=tmp_path / "dump")
    same(alone, third)
    assert third.generated == 0


def test_verl_saves_no_checkpoint_before_the_records_of_its_steps_are_on_the_disk(tmp_path, monkeypatch):
    seen: list[list[str]] = []
    save = Trainer._save_checkpoint

    def look(self: Trainer) -> None:
        writer = self.session.tape._writer
        write = writer._write
        folder = self.home / "tape" / f"step_{self.global_steps:06d}"
        seen.append(sorted(p.name for p in folder.iterdir() if not p.name.startswith(".")))
        save(self)
        writer._write = lambda path, draft: (time.sleep(0.3), write(path, draft))[1]  # a disk that is slow from now on

    monkeypatch.setattr(Trainer, "_save_checkpoint", look)
    run(tmp_path, "slow")
    assert seen == [["reward.0", "rollout.0", "update.0"]] * STEPS


@pytest.mark.parametrize(
    ("victim", "kill", "its", "others"),
    [
        ("ckpt", "generate 2", True, True),
        ("ckpt", "save 2", True, False),
        ("rollout", "update 2", True, True),
        ("rollout", "updated 2", False, True),
        ("rollout", "save 3", True, True),
    ],
)
def test_an_exchange_goes_on_when_both_sides_are_started_again(tmp_path, alone, victim, kill, its, others):
    other = "ckpt" if victim == "rollout" else "rollout"
    keys = {victim: {"saves": its, "kill": kill}, other: {"saves": others}}
    began = time.monotonic()
    first = pair(tmp_path, keys["ckpt"], keys["rollout"])
    assert isinstance(first[victim], Killed)
    assert time.monotonic() - began < 15
    ended = first[other]
    if isinstance(ended, BaseException):
        assert isinstance(ended, PeerLost)
        assert "died: its process is gone" in str(ended)
    if isinstance(ended, Trainer) and others:  # it needed nothing more, and has ended: it is not started again
        run(tmp_path, victim, share=victim, saves=its)
    else:
        again = {victim: {"saves": its}, other: {"saves": others}}
        second = pair(tmp_path, again["ckpt"], again["rollout"])
        assert not [e for e in second.values() if isinstance(e, BaseException)], second
        assert all(torch.equal(t.module.weight, alone.module.weight) for t in second.values())
    for role in ("ckpt", "rollout"):
        same(alone, tmp_path / role)


def test_entries_that_both_sides_are_done_with_are_removed_with_verl_s_files(tmp_path, alone):
    found = pair(tmp_path, {"keep": 0}, {"keep": 0, "kill": "update 3"})
    assert isinstance(found["ckpt"], PeerLost)
    second = pair(tmp_path, {"keep": 0}, {"keep": 0})
    assert all(torch.equal(t.module.weight, alone.module.weight) for t in second.values())
    left = {p.name for p in (tmp_path / "shared").iterdir()}
    assert not {"rollout_0", "ckpt_0", "ckpt_0.verl"} & left
    for path in (tmp_path / "shared").glob("ckpt_*.verl"):
        assert path.with_suffix("").exists(), "files without a record"


def test_without_keep_all_entries_stay(tmp_path):
    pair(tmp_path, {}, {})
    names = {p.name for p in (tmp_path / "shared").iterdir()}
    assert {
        f"{kind}_{i}{end}" for i in range(STEPS) for kind, end in (("rollout", ""), ("ckpt", ""), ("ckpt", ".verl"))
    } <= names


def test_a_side_whose_steps_are_all_done_is_not_trained_further(tmp_path, monkeypatch):
    pair(tmp_path, {}, {})

    def one_more(self: Trainer) -> None:  # as verl's synchronous trainer does it
        self.global_steps = STEPS + 1
        self.session.rollout(samples([{"uid": "", "raw_prompt": []}], N, 0), lambda: None, lambda found: found)

    monkeypatch.setattr(Trainer, "fit", one_more)
    with pytest.raises(HostError, match="all 3 steps of this run were done"):
        run(tmp_path, "ckpt", share="ckpt")
