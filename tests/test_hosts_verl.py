"""The verl host, as far as it can be tested without verl: see test_hosts_verl_real.py for the rest."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from crossrl.batch import Batch, Meaning, Ragged
from crossrl.hosts.verl import settings as settings_module
from crossrl.hosts.verl.checkpoints import Checkpoints
from crossrl.hosts.verl.errors import HostError
from crossrl.hosts.verl.fingerprints import CONTRACT, FINGERPRINTS
from crossrl.hosts.verl.padded import padded, rows
from crossrl.hosts.verl.patches import PATCHES, with_session, with_update
from crossrl.hosts.verl.plugin import asked
from crossrl.hosts.verl.prompts import samples
from crossrl.hosts.verl.settings import take_settings
from crossrl.hosts.verl.stages import computed_stages
from crossrl.hosts.verl.v1 import V1
from crossrl.hosts.verl.versions import SUPPORTED
from crossrl.hosts.verl.weights import actor_digest, forget_saved
from crossrl.patching.fingerprint import definitions, fingerprint
from crossrl.stages.base import At
from crossrl.tape.capture import capture

# -- sample ids --


def row(question: str, index: int = 0, **more: object) -> dict[str, object]:
    return {"uid": os.urandom(4).hex(), "raw_prompt": [{"role": "user", "content": question}], "index": index, **more}


def test_sample_ids_do_not_depend_on_verl_s_random_ids_nor_on_the_order_of_the_batch():
    first = samples([row("a", 3), row("b", 9)], n=2, epoch=1).sample_id
    again = samples([row("b", 9), row("a", 3)], n=2, epoch=1).sample_id
    assert set(first) == set(again)
    assert first[:2] == again[2:]
    assert all(s.split("/")[1] == "1" for s in first)


def test_another_prompt_answer_or_row_is_another_sample():
    base = row("a", 3, reward_model={"ground_truth": "1"})
    others = [row("b", 3, reward_model={"ground_truth": "1"}), {**base, "reward_model": {"ground_truth": "2"}},
              {**base, "index": 4}, {**base, "data_source": "x"}]  # fmt: skip
    ids = {samples([r], n=1, epoch=0).sample_id[0] for r in [base, *others]}
    assert len(ids) == 5


def test_the_same_prompt_twice_in_a_step_is_two_groups():
    batch = samples([row("a"), row("a")], n=2, epoch=0)
    assert len(set(batch.sample_id)) == 4
    assert len(set(batch["group_id"])) == 2


def test_what_cannot_be_stored_in_a_prompt_does_not_stop_the_run():
    batch = samples([row("a", extra_info={"index": 0, "picture": object()})], n=1, epoch=0)
    snapshot = capture(batch)
    assert snapshot.columns["extra_info"].texts == (b'{"index":0}',)
    assert [(e.field, e.path) for e in snapshot.left_out] == [("extra_info", "$.picture")]


# -- padding --


@pytest.mark.parametrize("right_aligned", [False, True])
def test_padded_tensors_come_back_bit_for_bit(right_aligned):
    column = Ragged.from_rows([[3, 4, 5], [], [9]], np.int32)
    tensor = padded(column, 4, 7, torch.long, right_aligned)
    assert tensor[0].tolist() == ([7, 3, 4, 5] if right_aligned else [3, 4, 5, 7])
    back = rows(tensor, torch.tensor(column.lengths), np.int32, right_aligned)
    assert np.array_equal(back.values, column.values)
    assert back.same_shape(column)


def test_bfloat16_log_probs_are_kept_exactly():
    values = torch.tensor([[-1.5, -0.3]], dtype=torch.bfloat16)
    found = rows(values, torch.tensor([2]), np.float32)
    assert torch.equal(torch.from_numpy(found.values).to(torch.bfloat16), values[0])


# -- the keys --


def trainer_with(version: str, monkeypatch: pytest.MonkeyPatch, **keys: object) -> types.SimpleNamespace:
    monkeypatch.setattr(settings_module, "installed", lambda: version)
    config = OmegaConf.create({
        "trainer": {"default_local_dir": "/tmp/x", "critic_warmup": 0, "save_freq": -1,
                    "v1": {"trainer_mode": "sync", "sampler": {}}},
        "algorithm": {"adv_estimator": "grpo", "filter_groups": {"enable": False}},
        "actor_rollout_ref": {"rollout": {"n": 2, "name": "vllm"}, "actor": {
            "checkpoint": {"save_contents": ["model", "optimizer", "extra"], "async_save": False}}},
    })  # fmt: skip
    for key, value in keys.items():
        OmegaConf.update(config, key, value, force_add=True)
    OmegaConf.set_struct(config, True)
    return types.SimpleNamespace(config=config)


def test_nothing_set_is_nothing_taken(monkeypatch):
    trainer = trainer_with("0.9.1", monkeypatch)
    before = OmegaConf.to_yaml(trainer.config)
    take_settings(trainer)
    assert trainer.crossrl_settings is None
    assert OmegaConf.to_yaml(trainer.config) == before


SKIP = {"actor_rollout_ref.rollout.skip_rollout": True, "actor_rollout_ref.rollout.skip_dump_dir": "/d"}


def test_skip_keys_that_verl_would_refuse_are_taken_out(monkeypatch):
    trainer = trainer_with("0.9.1", monkeypatch, **SKIP)
    take_settings(trainer)
    assert trainer.crossrl_settings.skip_dir == Path("/d")
    assert set(trainer.config.actor_rollout_ref.rollout) == {"n", "name"}


def test_verl_s_own_skip_steps_aside_where_it_has_the_same_key(monkeypatch):
    trainer = trainer_with("0.7.1", monkeypatch, **SKIP)
    take_settings(trainer)
    assert trainer.crossrl_settings.skip_dir == Path("/d")
    assert trainer.config.actor_rollout_ref.rollout.skip_rollout is False


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"trainer.share_data": "both"}, "trainer.share_data=both: want ckpt"),
        ({"trainer.share_data": "ckpt", "trainer.share_data_dri": "/x"}, "trainer.share_data_dri is unknown"),
        ({"trainer.share_data": "ckpt", **SKIP}, "both say where responses come from"),
        ({"trainer.share_data": "ckpt", "trainer.critic_warmup": 3}, "trainer.critic_warmup=3: want 0"),
        ({"trainer.share_data": "ckpt", "algorithm.adv_estimator": "gae"}, "critics are not exchanged"),
        ({"trainer.share_data": "ckpt", "trainer.share_data_keep": 1}, "share_data_keep=1 needs trainer.save_freq"),
        ({"trainer.share_data": "ckpt", "trainer.share_data_keep": -1}, "share_data_keep=-1: want 0 or more"),
        (
            {"trainer.share_data": "ckpt", "actor_rollout_ref.actor.checkpoint.save_contents": ["model"]},
            "needs model, optimizer and extra",
        ),
        ({"tape.mode": "verify"}, "tape.mode=verify: in verl there are off, record, and replay"),
        ({"tape.mode": "record", "tape.modes": 1}, "tape.modes is unknown; did you mean tape.mode?"),
        ({"tape.mode": "record", "tape.stages": ["sync"]}, "tape.stages holds 'sync'"),
        ({"tape.mode": "record", "tape.state": True}, "verl's state is in its own checkpoints"),
        ({"tape.mode": "record", "algorithm.filter_groups.enable": True}, "algorithm.filter_groups.enable"),
        ({"tape.mode": "record", "algorithm.adv_estimator": "remax"}, "adv_estimator=remax"),
    ],
)
def test_what_cannot_work_is_refused_by_its_key_before_anything_starts(monkeypatch, keys, message):
    with pytest.raises(HostError) as error:
        take_settings(trainer_with("0.9.1", monkeypatch, **keys))
    assert message in str(error.value)


def test_asynchronous_trainers_are_refused(monkeypatch):
    keys = {"tape.mode": "record", "trainer.v1.trainer_mode": "separate_async"}
    trainer = trainer_with("0.9.1", monkeypatch, **keys)
    trainer.replay_buffer = None  # the trainer with the queue
    with pytest.raises(HostError, match="trainer_mode=separate_async: want sync"):
        take_settings(trainer)


def test_a_derived_trainer_with_a_loop_of_its_own_is_refused(monkeypatch):
    class Base(types.SimpleNamespace):
        def fit(self) -> None: ...

    class Derived(Base):
        def fit(self) -> None: ...

    Base.__module__ = settings_module.TRAINERS[0]
    config = trainer_with("0.9.1", monkeypatch, **{"tape.mode": "record"}).config
    take_settings(Base(config=config))
    with pytest.raises(HostError, match="Derived has a fit of its own"):
        take_settings(Derived(config=config))


# -- stages --


def test_only_what_verl_computed_is_recorded():
    whole = Batch(("a",), {"response": ["x"], "response_ids": Ragged.from_rows([[1]], np.int32),
                           "old_log_probs": Ragged.from_rows([[-1.0]], np.float32)})  # fmt: skip
    (stage,) = computed_stages(whole)
    assert (stage.name, stage.writes) == ("old_log_prob", ("old_log_probs",))
    assert stage(whole, At(1)).columns.keys() == {"old_log_probs"}


# -- weights --


def worker_with(module: torch.nn.Module) -> types.SimpleNamespace:
    manager = types.SimpleNamespace(previous_saved_paths=["/own", "/exchanged"])
    engine = types.SimpleNamespace(module=module, checkpoint_manager=manager)
    role = types.SimpleNamespace(actor=types.SimpleNamespace(engine=engine))
    return types.SimpleNamespace(worker_dict={"actor_rollout": role})


def test_the_digest_of_the_actor_changes_with_one_bit_and_with_nothing_else():
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 2)
    first = actor_digest(worker_with(module))
    assert actor_digest(worker_with(module)) == first
    with torch.no_grad():
        module.weight.view(torch.int32)[1, 2] ^= 1
    assert actor_digest(worker_with(module)) != first


def test_an_actor_without_weights_or_a_worker_without_actor_is_an_error():
    with pytest.raises(HostError, match="no weights"):
        actor_digest(worker_with(torch.nn.Module()))
    with pytest.raises(HostError, match="no actor among the roles"):
        actor_digest(types.SimpleNamespace(worker_dict={"critic": types.SimpleNamespace()}))


def test_an_exchanged_checkpoint_is_not_counted_among_those_that_verl_keeps():
    worker = worker_with(torch.nn.Linear(1, 1))
    forget_saved(worker, "/exchanged")
    assert worker.worker_dict["actor_rollout"].actor.engine.checkpoint_manager.previous_saved_paths == ["/own"]


# -- exchanged checkpoints --


class Group:
    """In the place of verl's workers: saves and loads a file."""

    def __init__(self, root: Path) -> None:
        self.root, self.seen, self.loaded = root, [], []
        self.content = "weights"

    def save_checkpoint(self, path: str, hdfs: None, step: int, max_ckpt_to_keep: None) -> None:
        Path(path, "model.pt").write_text(self.content)
        self.seen = sorted(p.name for p in self.root.iterdir() if not p.name.startswith("."))

    def load_checkpoint(self, path: str, hdfs: None, del_local_after_load: bool) -> None:
        self.loaded.append(Path(path, "model.pt").read_text())


def saved(tmp_path: Path) -> tuple[Checkpoints, Group, types.SimpleNamespace]:
    group = Group(tmp_path)
    checkpoints = Checkpoints(tmp_path, group, lambda function, *args: [])
    facts = checkpoints.save(3, 4)
    header = types.SimpleNamespace(info={"path/checkpoint": facts})
    return checkpoints, group, types.SimpleNamespace(path=tmp_path / "ckpt_3", header=header)


def test_a_checkpoint_is_visible_when_it_is_complete_and_loads_what_was_saved(tmp_path):
    checkpoints, group, record = saved(tmp_path)
    assert group.seen == [], "while verl saves, nothing is visible"
    assert (tmp_path / "ckpt_3.verl" / "model.pt").read_text() == "weights"
    checkpoints.load(record)
    assert group.loaded == ["weights"]


@pytest.mark.parametrize("damage", ["changed", "missing", "foreign"])
def test_a_checkpoint_that_is_not_the_one_saved_is_not_loaded(tmp_path, damage):
    checkpoints, group, record = saved(tmp_path)
    file = tmp_path / "ckpt_3.verl" / "model.pt"
    if damage == "changed":
        file.write_text("weightz")
    elif damage == "missing":
        file.unlink()
    else:
        record.header.info = {}
    with pytest.raises(HostError, match={"changed": "not what was saved", "missing": "missing",
                                         "foreign": "has no checkpoint of verl"}[damage]):  # fmt: skip
        checkpoints.load(record)
    assert group.loaded == []


def test_what_a_killed_side_left_is_removed_and_saved_anew(tmp_path):
    (tmp_path / ".ckpt_0.verl.abc.tmp").mkdir()
    (tmp_path / "ckpt_0.verl").mkdir()  # its record never came
    checkpoints = Checkpoints(tmp_path, Group(tmp_path), lambda function, *args: [])
    checkpoints.clean()
    checkpoints.save(0, 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ckpt_0.verl"]
    assert [p.name for p in (tmp_path / "ckpt_0.verl").iterdir()] == ["model.pt"]


def test_files_are_removed_only_after_their_record(tmp_path):
    checkpoints = Checkpoints(tmp_path, Group(tmp_path), lambda function, *args: [])
    for index in range(4):
        (tmp_path / f"ckpt_{index}.verl").mkdir()
    for index in (1, 2):
        (tmp_path / f"ckpt_{index}").mkdir()
    checkpoints.remove(published=3)  # the last one is saved, and its record has not come yet
    assert sorted(p.name for p in tmp_path.glob("*.verl")) == ["ckpt_1.verl", "ckpt_2.verl", "ckpt_3.verl"]
    assert not list(tmp_path.glob(".*"))


# -- the patches, where nothing is asked --


@pytest.mark.parametrize("wrapper", [with_session, with_update])
def test_unasked_wrappers_hand_on_the_very_objects(wrapper):
    seen: list[tuple[object, ...]] = []

    def original(self: object, *args: object, **kwargs: object) -> object:
        seen.append((self, *args, kwargs["c"]))
        return answer

    trainer, a, c, answer = types.SimpleNamespace(crossrl_settings=None), object(), object(), object()
    attributes = dict(vars(trainer))
    assert wrapper(original)(trainer, a, c=c) is answer
    assert all(x is y for x, y in zip(seen[0], (trainer, a, c), strict=True))
    assert vars(trainer) == attributes


def test_unasked_wrappers_do_not_hide_verl_s_own_error():
    def original(self: object) -> None:
        raise KeyError("verl's")

    for wrapper in (with_session, with_update):
        with pytest.raises(KeyError, match="verl's"):
            wrapper(original)(types.SimpleNamespace())


# -- the plug-in -

VERL = """
import importlib, logging
for name in NAMES:
    try:
        importlib.import_module(name)
    except Exception as error:           # as verl does with its entry points
        logging.debug("hidden: %s", error)
"""


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Path]:
    """A package named verl, of a version to be filled in, that loads the host as verl does."""
    (tmp_path / "verl" / "trainer" / "ppo").mkdir(parents=True)
    for folder in ("verl/trainer", "verl/trainer/ppo"):
        (tmp_path / folder / "__init__.py").write_text("")
    (tmp_path / "verl" / "__init__.py").write_text(VERL.replace("NAMES", "['crossrl.hosts.verl']"))
    (tmp_path / "verl" / "trainer" / "ppo" / "ray_trainer.py").write_text(
        "class RayPPOTrainer:\n    def init_workers(self): ...\n    def fit(self):\n        print('trained')\n"
        "    def _update_actor(self, batch): ...\n"
    )
    yield tmp_path


def run_fake(fake: Path, version: str, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    info = fake / f"verl-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: verl\nVersion: {version}\n")
    program = "import verl; from verl.trainer.ppo.ray_trainer import RayPPOTrainer as T; T().fit()"
    src = Path(__file__).parents[1] / "src"
    return subprocess.run(
        [sys.executable, "-c", program, *argv], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": f"{fake}{os.pathsep}{src}", **environment},
    )  # fmt: skip


@pytest.mark.parametrize("version", ["0.6.0", "9.9"])
def test_an_unknown_version_is_refused_when_the_host_is_asked_for(fake, version):
    done = run_fake(fake, version, "++trainer.share_data=ckpt")
    assert done.returncode == 1
    assert f"verl {version} is installed; the host is written for {', '.join(SUPPORTED)}" in done.stderr
    assert "trained" not in done.stdout


@pytest.mark.parametrize("version", ["0.6.0", "0.9.1"])
def test_who_asks_for_nothing_is_left_alone(fake, version):
    done = run_fake(fake, version, "trainer.total_epochs=1")
    assert (done.returncode, done.stdout) == (0, "trained\n")


@pytest.mark.parametrize("version", ["0.9.1", "0.8.0", "0.7.1"])
def test_a_known_version_with_other_sources_is_refused_with_what_changed(fake, version):
    done = run_fake(fake, version, "++tape.mode=record")
    assert done.returncode == 1
    assert "patch verl.v0.fit refuses verl.trainer.ppo.ray_trainer:RayPPOTrainer.fit" in done.stderr
    assert "it was changed here" in done.stderr
    needs_v1 = "there is no source file for verl.trainer.ppo.v1.trainer_base" in done.stderr
    assert needs_v1 is SUPPORTED[version].v1


def test_without_the_host_s_exit_verl_would_have_hidden_it(fake):
    """The control: an ordinary exception in a plug-in is swallowed, and the run goes on without."""
    (fake / "broken.py").write_text("raise RuntimeError('no')")
    (fake / "verl" / "__init__.py").write_text(VERL.replace("NAMES", "['broken']"))
    done = run_fake(fake, "0.9.1", "++tape.mode=record")
    assert (done.returncode, done.stdout) == (0, "trained\n")


def test_switched_off_nothing_happens_even_if_asked(fake):
    done = run_fake(fake, "0.9.1", "++tape.mode=record", CROSSRL_VERL="0")
    assert (done.returncode, done.stdout) == (0, "trained\n")


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("++tape.mode=record", True), ("tape.mode=off", False), ("+trainer.share_data=rollout", True),
        ("trainer.share_data=null", False), ("trainer.share_data_dir=/x", False),
        ("actor_rollout_ref.rollout.skip_rollout=True", True), ("actor_rollout_ref.rollout.skip_rollout=False", False),
    ],
)  # fmt: skip
def test_what_counts_as_asking(monkeypatch, word, answer):
    monkeypatch.delenv("CROSSRL_VERL", raising=False)
    assert asked(["main_ppo", word]) is answer


def test_outside_of_verl_an_import_installs_nothing():
    program = (
        "import json, sys, crossrl.hosts.verl\nfrom crossrl import patching\n"
        "print(json.dumps([len(patching.REGISTRY.patches()), 'torch' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout) == [0, False], done.stderr


# -- the sources that it was written for --

WHEELS = os.environ.get("CROSSRL_TEST_WHEELS", "")


@pytest.mark.skipif(not WHEELS, reason="CROSSRL_TEST_WHEELS is not set: the folder of `make wheels`")
@pytest.mark.parametrize("version", list(SUPPORTED))
def test_fingerprints_are_those_of_the_packaged_sources(version):
    (wheel,) = Path(WHEELS).glob(f"verl-{version}-*.whl")
    known = {**FINGERPRINTS, **CONTRACT}
    with zipfile.ZipFile(wheel) as archive:
        for target, prints in known.items():
            if version in prints:
                module, _, qualname = target.partition(":")
                text = archive.read(module.replace(".", "/") + ".py").decode()
                (node,) = definitions(ast.parse(text), qualname)
                assert fingerprint(node).startswith(prints[version]), target


def test_every_version_has_a_fingerprint_of_all_that_it_needs():
    for version, facts in SUPPORTED.items():
        names = {p.name for p in PATCHES if version in p.fingerprints}
        assert {"verl.v0.init-workers", "verl.v0.fit", "verl.v0.update-actor"} <= names
        assert {"verl.v1.init", "verl.v1.fit", "verl.v1.update-actor"} <= names or not facts.v1


def test_records_of_the_default_trainer_do_not_hold_the_seconds_of_its_agent_loop():
    """Else no two runs would have equal records: found by comparing a resumed run with one by itself."""
    session = types.SimpleNamespace(
        reading=lambda: (str, frozenset({1}), 4, Meaning(1.0, "none", "x", 0)),
        versions_of=lambda found: [0] * len(found),
    )
    adapter = V1(types.SimpleNamespace(), session)  # type: ignore[arg-type]
    ids = torch.tensor([[3, 1]])

    def record(seconds: float) -> Batch:
        extra = {"metrics": [{"generate_sequences": seconds, "num_preempted": 2}], "num_turns": [2]}
        data = {"prompts": ids, "responses": ids, "response_mask": torch.ones_like(ids), **extra}
        return adapter._batch(Batch(("a",)), data, [{}])

    assert record(0.5)["verl"] == record(7.25)["verl"]
    assert record(0.5)["verl"][0] == {"metrics": {"generate_sequences": 0.0, "num_preempted": 2}, "num_turns": 2}
