"""What a review of the verl host found, one kind after the other: each of these once passed, and should not have."""

from __future__ import annotations

import json
import logging
import sys
import types
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from test_hosts_verl_resume import Played, Trainer, files, play  # noqa: F401  (a fixture)

from crossrl.batch import Batch, BatchError
from crossrl.config.tape import TapeConfig
from crossrl.cross.arm_numerics import declared
from crossrl.hosts.verl import curves
from crossrl.hosts.verl import settings as settings_module
from crossrl.hosts.verl.conflicts import conflicts
from crossrl.hosts.verl.curves import Rows
from crossrl.hosts.verl.errors import HostError
from crossrl.hosts.verl.facts import model_config
from crossrl.hosts.verl.installation import installation, of_all
from crossrl.hosts.verl.padded import equal, not_given_back
from crossrl.hosts.verl.prompts import samples
from crossrl.hosts.verl.sampling import sampling
from crossrl.hosts.verl.session import Session
from crossrl.hosts.verl.settings import Settings, read_settings
from crossrl.hosts.verl.unseen import Unseen
from crossrl.hosts.verl.v0 import V0
from crossrl.hosts.verl.v1 import V1
from crossrl.hosts.verl.weights import actor_digest, forget_saved
from crossrl.tape import CannotStore, open_run
from crossrl.tape.capture import capture
from crossrl.tape.errors import Mismatch
from crossrl.tape.refuse import outputs


def run(root: Path, name: str = "run", skip: Path | None = None, kind: type[Played] = Played, **tape: Any) -> Trainer:
    """Three steps with a session around them. ``tape``: as in ``TapeConfig``."""
    trainer = Trainer(root, name, saves=False, kill="")
    settings = Settings(
        TapeConfig(**{"mode": "record", **tape}), skip, None, root / "shared", 20.0, 20.0, None, trainer.home, False
    )  # fmt: skip
    return play(trainer, kind(trainer, settings))


class Counted(Played):
    """``digests``: how often the weights were hashed."""

    digests = 0

    def ask(self, function: Any, *args: Any) -> list[Any]:
        type(self).digests += function is actor_digest
        return super().ask(function, *args)


def config(**keys: Any) -> Any:
    found = OmegaConf.create({
        "trainer": {"default_local_dir": "/tmp/x", "critic_warmup": 0, "save_freq": -1,
                    "v1": {"trainer_mode": "sync", "sampler": {}}},
        "algorithm": {"adv_estimator": "grpo"}, "tape": {"mode": "record"},
        "actor_rollout_ref": {
            "rollout": {"n": 2, "name": "vllm"}, "model": {},
            "actor": {"strategy": "fsdp", "checkpoint": {"save_contents": ["model", "optimizer", "extra"]}}},
    })  # fmt: skip
    for key, value in keys.items():
        OmegaConf.update(found, key.replace("__", "."), value, force_add=True)
    return found


# -- settings with which the host cannot do what it is asked --

SHARE = {"tape.mode": "off", "trainer.share_data": "ckpt"}
SKIP = {"tape.mode": "off", "actor_rollout_ref.rollout.skip_rollout": True}
MODEL = "actor_rollout_ref.model"
REFUSED = [
    ("0.9.1", {f"{MODEL}.lora_rank": 8}, f"{MODEL}.lora_rank=8 with actor.strategy=fsdp"),
    ("0.9.1", {f"{MODEL}.lora_rank": 8, **SHARE}, "want actor_rollout_ref.actor.strategy=fsdp2"),
    ("0.9.1", {f"{MODEL}.lora_adapter_path": "/a"}, f"{MODEL}.lora_adapter_path=/a"),
    ("0.9.1", {f"{MODEL}.lora": {"rank": 8}, "actor_rollout_ref.actor.strategy": "megatron"}, f"{MODEL}.lora.rank=8"),
    ("0.9.1", {"skip.rollout": {"enable": True}}, "skip.rollout.enable=True"),
    ("0.9.1", {"skip.rollout_tq": {"enable": True}, **SKIP}, "skip.rollout_tq.enable=True"),
    ("0.8.0", {"actor_rollout_ref.rollout.skip": {"enable": True}, **SHARE}, "actor_rollout_ref.rollout.skip.enable"),
    ("0.9.1", {"trainer.val_only": True}, "trainer.val_only=True: no step is trained"),
    ("0.7.1", {}, "trainer.use_legacy_worker_impl=auto: want disable"),
    ("0.7.1", {"trainer.use_legacy_worker_impl": "enable", **SHARE}, "use_legacy_worker_impl=enable: want disable"),
]
ACCEPTED = [
    ("0.9.1", {f"{MODEL}.lora_rank": 8, "actor_rollout_ref.actor.strategy": "fsdp2"}),
    ("0.9.1", {f"{MODEL}.lora_rank": 0, f"{MODEL}.lora": {"rank": 0, "adapter_path": None}}),
    ("0.9.1", {f"{MODEL}.lora_rank": 8, **SKIP}),  # which looks at no weights
    ("0.9.1", {"skip": {"rollout": {"enable": False}, "rollout_tq": {"enable": False}}}),
    ("0.7.1", {"trainer.use_legacy_worker_impl": "disable"}),
    ("0.7.1", SKIP),
    ("0.8.0", {}),
]


@pytest.mark.parametrize(("version", "keys", "message"), REFUSED)
def test_a_setting_with_which_records_would_be_wrong_is_refused_by_its_key(monkeypatch, version, keys, message):
    monkeypatch.setattr("crossrl.hosts.verl.conflicts.installed", lambda: version)
    monkeypatch.setattr(settings_module, "installed", lambda: version)
    with pytest.raises(HostError) as error:
        read_settings(config(**keys), v1=False)
    assert message in str(error.value)


@pytest.mark.parametrize(("version", "keys"), ACCEPTED)
def test_the_same_settings_where_they_do_no_harm_are_accepted(monkeypatch, version, keys):
    monkeypatch.setattr("crossrl.hosts.verl.conflicts.installed", lambda: version)
    settings = read_settings(config(**keys), v1=False)
    assert settings is not None
    assert conflicts(settings, config(**keys)) == []


# -- the digest of the weights --


class FullyShardedDataParallel(torch.nn.Module):
    """FSDP1 by its name; the real one refuses a CPU."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self._fsdp_wrapped_module = inner


def worker_of(engine: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        worker_dict={"actor": types.SimpleNamespace(actor=types.SimpleNamespace(engine=engine))}
    )


def test_an_adapter_that_the_digest_would_not_see_is_an_error():
    base = torch.nn.Linear(2, 2)

    def what_the_rollout_gets() -> Any:  # verl leaves out names with lora_
        return base.state_dict().items(), None

    sharded = types.SimpleNamespace(module=FullyShardedDataParallel(base), get_per_tensor_param=what_the_rollout_gets)
    assert actor_digest(worker_of(sharded))
    base.peft_config = {}
    megatron = types.SimpleNamespace(module=[base], get_per_tensor_param=what_the_rollout_gets, peft_cls=object())
    for engine in (sharded, megatron):
        with pytest.raises(HostError, match=r"trains a LoRA adapter.*strategy=fsdp2"):
            actor_digest(worker_of(engine))
    megatron.peft_cls = None
    assert actor_digest(worker_of(megatron))


NORMAL = {"actor/grad_norm": 0.5, "actor/lr": 1e-6}


def test_an_update_that_changes_nothing_is_a_warning_each_time(caplog):
    unseen = Unseen()
    unseen.look(1, "a", "b", NORMAL)
    for step in (2, 3):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "crossrl.tape"):
            unseen.look(step, "b", "b", NORMAL)
        assert f"the update of step {step} changed none of the weights" in caplog.text
        assert "norm 0.5 and a learning rate of 1e-06" in caplog.text


@pytest.mark.parametrize(
    "metrics",
    [
        {**NORMAL, "actor/grad_norm": float("nan")},
        {**NORMAL, "actor/grad_norm": float("inf")},
        {**NORMAL, "actor/grad_norm": 0.0},
        {**NORMAL, "actor/lr": 0.0},
        {},
    ],
)
def test_an_update_that_verl_skips_or_makes_with_rate_zero_may_change_nothing(caplog, metrics):
    unseen = Unseen()
    for step in range(1, 5):
        unseen.look(step, "a", "a", metrics)
    assert caplog.text == ""


def test_the_first_step_of_a_warm_up_has_rate_zero_though_verl_reports_the_next_one(caplog):
    unseen = Unseen()
    unseen.look(1, "a", "a", NORMAL)
    assert caplog.text == ""


def test_a_run_whose_weights_are_not_those_that_train_says_so(tmp_path, caplog):
    class Blind(Played):
        def ask(self, function: Any, *args: Any) -> list[Any]:
            return ["0" * 64] if function is actor_digest else super().ask(function, *args)

    def train(self: Trainer, batch: Batch) -> dict[str, float]:
        return NORMAL

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train", train)
        run(tmp_path, kind=Blind)
    for step in (2, 3):
        assert f"the update of step {step} changed none of the weights" in caplog.text


# -- verl's list of checkpoints --


@pytest.mark.parametrize("name", ["checkpoint_manager", "checkpoint_mananager"])
def test_an_exchanged_checkpoint_is_taken_off_verl_s_list_however_verl_spells_it(name):
    manager = types.SimpleNamespace(previous_saved_paths=["global_step_10", "/x"])
    forget_saved(worker_of(types.SimpleNamespace(**{name: manager})), "/x")
    assert manager.previous_saved_paths == ["global_step_10"]


@pytest.mark.parametrize("engine", [{}, {"checkpoint_manager": types.SimpleNamespace(paths=[])}])
def test_where_verl_s_list_is_not_found_nothing_is_left_to_be_deleted(engine):
    with pytest.raises(HostError, match=r"previous_saved_paths.* is not where it was"):
        forget_saved(worker_of(types.SimpleNamespace(**engine)), "/x")


# -- with what the workers compute --


def test_workers_say_accelerator_and_versions(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91000)
    found = installation(None, "cuda")
    assert found["device"] == "cuda (H200)"
    assert found["cudnn"] == "91000"
    assert {"torch", "transformers", "cuda", "tf32", "ray"} <= set(found)
    assert "vllm" not in found, "not installed here"
    monkeypatch.setattr(torch, "npu", types.SimpleNamespace(get_device_name=lambda: "910B"), raising=False)
    assert installation(None, "npu")["device"] == "npu (910B)"


def test_workers_that_differ_are_all_named():
    assert of_all([{"vllm": "0.11"}, {}]) == {"vllm": "0.11 and not installed"}


def test_two_runs_on_other_hardware_or_engines_declare_it(tmp_path):
    def on(device: str, **packages: str) -> type[Played]:
        class There(Played):
            def ask(self, function: Any, *args: Any) -> list[Any]:
                found = super().ask(function, *args)
                return [{**f, "device": device, **packages} for f in found] if function is installation else found

        return There

    homes = [
        run(tmp_path, "a", kind=on("cuda (H100)", vllm="0.11", ray="1")).home,
        run(tmp_path, "b", kind=on("cuda (A100)", vllm="0.12", ray="2")).home,
        run(tmp_path, "c", kind=on("cuda (A100)", vllm="0.12", ray="3")).home,
    ]
    for stage in ("rollout", "update"):
        assert declared(homes[0], homes[1], stage, 2) == [
            "device: cuda (H100) against cuda (A100)", "vllm: 0.11 against 0.12",
        ]  # fmt: skip
        assert declared(homes[1], homes[2], stage, 2) == []


# -- two runs in one folder --


def test_a_second_run_in_the_folder_of_one_that_goes_on_is_refused_before_it_touches_anything(tmp_path, monkeypatch):
    home = run(tmp_path).home
    before = {p: p.read_bytes() for p in home.rglob("*") if p.is_file()}
    first = Rows(home)
    first.lock()
    before[home / ".lock"] = (home / ".lock").read_bytes()
    monkeypatch.setattr(curves, "LOCK_S", 0.1)
    with pytest.raises(HostError, match=r"another run is writing to .*run; wait for it, or set trainer\.default_local"):
        run(tmp_path)
    assert {p: p.read_bytes() for p in home.rglob("*") if p.is_file()} == before
    first.close()
    run(tmp_path)


def test_a_new_start_in_the_folder_of_a_finished_run_keeps_its_curve_with_its_records(tmp_path):
    home = run(tmp_path).home
    old = (home / "metrics.jsonl").read_text(), (home / "config.yaml").read_text()
    run(tmp_path)
    aside = home / "tape" / "superseded-0"
    assert ((aside / "metrics.jsonl").read_text(), (aside / "config.yaml").read_text()) == old
    assert len(open_run(home).steps()) == 3
    assert [json.loads(line)["step"] for line in (home / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]


def test_a_torn_line_is_dropped_and_the_rest_kept(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st{"step": 2}\n[1]\n{"step": 2}\n{"step": 3')
    Rows(tmp_path).start(2, OmegaConf.create({"trainer": {}}), 3)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    assert "3 line(s) that are not whole" in caplog.text
    assert not list(tmp_path.glob("superseded-*"))


def test_without_records_the_old_curve_is_kept_beside_the_new_one(tmp_path):
    for content in ("a", "b"):
        (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "run": content}) + "\n")
        rows = Rows(tmp_path)
        rows.start(0, OmegaConf.create({"trainer": {}}), 3)
        rows.close()
    assert [json.loads((tmp_path / f"superseded-{i}/metrics.jsonl").read_text())["run"] for i in (0, 1)] == ["a", "b"]


# -- what a record cannot give back --

TRAJECTORY = {
    "prompts": torch.tensor([[5, 6], [5, 7]]), "responses": torch.tensor([[2, 1], [3, 1]]),
    "response_mask": torch.ones(2, 2, dtype=torch.int64), "loss_mask": torch.ones(2, 2, dtype=torch.int64),
    "input_ids": torch.tensor([[5, 6, 2, 1], [5, 7, 3, 1]]), "position_ids": torch.arange(4).repeat(2, 1),
    "num_turns": [2, 2], "extra_fields": [{"reward_extra_info": {"seen": np.zeros(2)}}] * 2,
}  # fmt: skip


def odd_of_v1(monkeypatch: pytest.MonkeyPatch, **more: Any) -> list[str]:
    """What the trainer with the queue says of trajectories with ``more`` in them."""
    prompts = {"uid": ["u0", "u1"], "raw_prompt": [[{"content": "a"}], [{"content": "b"}]]}
    data = {**TRAJECTORY, **prompts, **more}
    queue = types.SimpleNamespace(kv_batch_get=lambda **_: data)
    monkeypatch.setitem(sys.modules, "transfer_queue", queue)
    keys = ["u0_0_0", "u1_0_0"]
    meta = types.SimpleNamespace(keys=list(keys), tags=[{}, {}])
    said: list[list[str]] = []
    session = types.SimpleNamespace(
        refuse_unlike=said.append, versions_of=lambda reported: [0] * len(reported),
        reading=lambda: (str, frozenset([1]), 2, None),
    )  # fmt: skip
    trainer = types.SimpleNamespace(replay_buffer=types.SimpleNamespace(sample=lambda **_: (meta, {})))
    adapter = V1(trainer, session)  # type: ignore[arg-type]
    adapter.attach(types.SimpleNamespace(generate_sequences=lambda prompts: None))
    given = samples([{"raw_prompt": p} for p in prompts["raw_prompt"]], 1, 0)
    _, batch = adapter._asked(given, prompts, keys, 1, 2)
    assert said == [batch.info["unlike"]]
    return said[0]


def test_trajectories_of_the_queue_with_other_tensors_are_said_not_to_come_back(monkeypatch):
    assert odd_of_v1(monkeypatch) == []
    images = [{"pixel_values": torch.ones(2, 3)}] * 2
    more = {"multi_modal_inputs": images, "routed_experts": torch.ones(2, 4, 1), "teacher_ids": [np.zeros(2)] * 2}
    for name, value in more.items():
        assert odd_of_v1(monkeypatch, **{name: value}) == [name]
    assert odd_of_v1(monkeypatch, multi_modal_data=[{"images": [object()]}] * 2) == ["multi_modal_data"]


def test_the_first_such_trajectory_stops_skip_and_exchange_and_warns_who_only_records(caplog):
    session = Session.__new__(Session)
    for skip, share in ((Path("/d"), None), (None, "ckpt")):
        session.settings = types.SimpleNamespace(skip_dir=skip, share=share)  # type: ignore[assignment]
        with pytest.raises(HostError, match="routed_experts of verl's rollout cannot be rebuilt"):
            session.refuse_unlike(["routed_experts"])
    session.settings = types.SimpleNamespace(skip_dir=None, share=None)  # type: ignore[assignment]
    session.refuse_unlike(["routed_experts"])
    assert "it is recorded, but will not be replayed" in caplog.text


def test_what_is_only_logged_does_not_count():
    assert not_given_back([{"acc": np.zeros(2), "n": np.int64(3), "t": [1.0], "none": None}], ["acc"]) == []
    assert not_given_back([{"acc": np.zeros(2)}]) == ["acc"]


def test_tensors_of_another_dtype_are_not_equal_and_do_not_stumble():
    assert not equal(torch.ones(2), torch.ones(2, dtype=torch.bfloat16))
    assert equal(torch.ones(2), torch.ones(2))


def test_what_is_left_out_of_what_a_stage_writes_is_not_offered_for_acceptance():
    batch = Batch(("a",), {"verl": [{"picture": object()}]})
    snapshot = capture(batch)
    header = types.SimpleNamespace(fields={"verl": None}, left_out=snapshot.left_out)
    (found,) = outputs(types.SimpleNamespace(header=header), ["verl"])  # type: ignore[arg-type]
    assert isinstance(found, Mismatch)
    assert (found.key, found.acceptable) == ("left_out.verl", False)


def test_a_sample_of_the_update_that_was_not_generated_is_named_as_such():
    adapter = V0(None, None)  # type: ignore[arg-type]
    tensors = {"responses": torch.tensor([[3]]), "attention_mask": torch.ones(1, 2)}
    data = types.SimpleNamespace(batch=tensors, non_tensor_batch={"uid": ["u"]}, meta_info={})
    with pytest.raises(BatchError, match="samples that this step's rollout did not have"):
        adapter.visible((data,), {})


# -- what decides what is sampled --

ROLLOUT = {
    "_target_": "verl.RolloutConfig", "name": "vllm", "n": 2, "temperature": 1.0, "ignore_eos": False, "seed": 42,
    "gpu_memory_utilization": 0.5, "tensor_model_parallel_size": 2, "load_format": "dummy", "repetition_penalty": 1.0,
    "engine_kwargs": {"vllm": {}, "sglang": {}}, "val_kwargs": {"n": 1}, "profiler": {"enable": False},
    "agent": {"num_workers": 8, "default_agent_loop": "tool_agent", "agent_loop_config_path": None},
    "multi_turn": {"enable": True, "max_assistant_turns": 3, "tool_config_path": None},
    "mtp": {"enable": False, "method": "mtp"}, "skip": {"enable": False, "dump_dir": "/a"},
}  # fmt: skip


def sampled(**keys: Any) -> dict[str, Any]:
    found = OmegaConf.create(ROLLOUT)
    for key, value in keys.items():
        OmegaConf.update(found, key, value, force_add=True)
    return sampling(found)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ignore_eos", True), ("temperature", 0.7), ("repetition_penalty", 1.1), ("multi_turn.max_assistant_turns", 1),
        ("multi_turn.tool_config_path", "b.yaml"), ("agent.default_agent_loop", "single_turn_agent"),
        ("name", "sglang"), ("engine_kwargs.vllm.generation_config", "auto"), ("a_key_of_a_later_version", 1),
        ("mtp.enable", True),
    ],
)  # fmt: skip
def test_a_setting_that_changes_what_is_sampled_changes_the_fingerprint(key, value):
    assert sampled(**{key: value}) != sampled()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gpu_memory_utilization", 0.9), ("tensor_model_parallel_size", 1), ("load_format", "auto"),
        ("val_kwargs.n", 4), ("agent.num_workers", 1), ("profiler.enable", True), ("skip.dump_dir", "/b"),
        ("engine_kwargs.sglang.attention_backend", "x"), ("mtp.method", "y"), ("full_determinism", True),
        ("enable_rollout_routing_replay", False), ("limit_images", None), ("qat", None),
    ],
)  # fmt: skip
def test_a_setting_of_speed_place_or_of_another_version_s_default_does_not(key, value):
    assert sampled(**{key: value}) == sampled()


def test_a_file_of_settings_counts_by_its_content_wherever_it_is(tmp_path):
    first, moved, other = (tmp_path / name for name in ("a.yaml", "b.yaml", "c.yaml"))
    for path, text in ((first, "x"), (moved, "x"), (other, "y")):
        path.write_text(text)
    found = [sampled(**{"agent.agent_loop_config_path": str(path)}) for path in (first, moved, other)]
    assert found[0] == found[1] != found[2]


# -- a run that recorded nothing --


@pytest.mark.parametrize("tape", [{"stages": ["ref_log_prob"]}, {"steps": "7-9"}])
def test_a_recording_run_that_recorded_nothing_ends_with_an_error_that_says_so(tmp_path, tape):
    with pytest.raises(HostError, match="nothing was recorded: the run ended at step 3"):
        run(tmp_path, **tape)


def test_a_run_that_failed_says_its_own_error(tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "train", lambda self, batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, stages=["update"])


# -- where the model is --


def test_a_model_that_is_not_local_is_read_where_verl_has_copied_it(tmp_path):
    remote = OmegaConf.create({"actor_rollout_ref": {"model": {"path": "hdfs://node/models/qwen"}}})
    found = model_config(remote, types.SimpleNamespace(name_or_path=str(tmp_path)))
    assert found["model_type"] == "qwen2"
    with pytest.raises(HostError, match=r"model\.path=hdfs://node/models/qwen.*Copy the model to a local folder"):
        model_config(remote, types.SimpleNamespace(name_or_path="/nowhere"))


# -- prompts --


def answer(value: Any) -> dict[str, Any]:
    return {"raw_prompt": [{"content": "q"}], "reward_model": {"ground_truth": value}, "index": 3}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Decimal(1), Decimal(2)), (1 << 20000, (1 << 20000) + 1), ({1, 2}, {1, 3}), (None, Decimal(1)),
        ({1: "x"}, {2: "x"}), (torch.zeros(2000), torch.arange(2000.0)),
        (np.array([Decimal(1)], object), np.array([Decimal(2)], object)),
    ],
    ids=["decimal", "large", "set", "none", "keys", "tensor", "array"],
)  # fmt: skip
def test_different_answers_are_different_samples_even_where_they_cannot_be_stored(one, other):
    ids = [samples([answer(value)], 1, 0).sample_id for value in (one, other, one)]
    assert ids[0] == ids[2] != ids[1]


def test_what_has_no_text_of_its_own_has_the_same_id_in_every_process():
    class Thing: ...

    assert samples([answer(Thing())], 1, 0).sample_id == samples([answer(Thing())], 1, 0).sample_id


def test_whether_an_answer_is_left_out_or_refused_is_the_tape_s_to_say():
    batch = samples([answer(Decimal(1))], 1, 0)
    assert [each.field for each in capture(batch, leave_out=True).left_out] == ["ground_truth"]
    with pytest.raises(CannotStore, match="ground_truth"):
        capture(batch, leave_out=False)


# -- cost --


@pytest.mark.parametrize(
    ("keys", "count"),
    [
        ({}, 4),  # before the first update and after each
        ({"mode": "off", "skip": True}, 0),
        ({"stages": ["reward"]}, 0),
        ({"steps": "2"}, 2),
        ({"stages": ["rollout"]}, 3),
    ],
)
def test_weights_are_hashed_only_where_somebody_sees_it(tmp_path, keys, count):
    Counted.digests = 0
    skip = tmp_path / "dump" if keys.pop("skip", False) else None
    run(tmp_path, kind=Counted, skip=skip, **keys)
    assert Counted.digests == count
