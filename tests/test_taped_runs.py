"""Whole runs with a tape: rollout skip, refusals, verification, and a resumed run's tape."""

import sys

import numpy as np
import pyarrow.parquet as pq
import pytest

from crossrl import placement
from crossrl.batch import Batch, Ragged
from crossrl.cli.train_command import open_reporter
from crossrl.config import load_config
from crossrl.config.keys import leaves
from crossrl.report import Reporter
from crossrl.stages.advantage import Advantage
from crossrl.stages.rollout import Rollout
from crossrl.tape.api import open_run
from crossrl.tape.diff import diff_runs
from crossrl.tape.errors import ReplayRefused, TapeError
from crossrl.trainer import Trainer
from crossrl.verify import Request, VerifyError, verify


class Heard(Reporter):
    """Keeps the lines that a person would see."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def message(self, message):
        self.lines.append(message)

    warn = message


@pytest.fixture
def train(demo_files, tmp_path):
    """``train(folder, *overrides)``: exit code and lines. Two steps on eight prompts, several mini-batches, KL.

    ``train.load``: the configuration alone. ``train.lines``: those of the last run, also when it raised."""

    def load(folder, *overrides):
        base = [
            f"data.train_files={demo_files}/train.parquet", "data.train_max_samples=8", "data.train_batch_size=4",
            "data.max_prompt_length=8", "data.max_response_length=5", "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            f"actor_rollout_ref.model.path={demo_files}/model", "actor_rollout_ref.actor.optim.lr=1e-3",
            "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.use_kl_loss=True",
            f"reward.custom_reward_function.path={demo_files}/sort_reward.py", "reward.num_workers=1",
            "trainer.num_threads=1", "trainer.device=cpu", f"trainer.default_local_dir={tmp_path / folder}",
            "trainer.project_name=p", "trainer.experiment_name=e", "trainer.logger=[]",
        ]  # fmt: skip
        return load_config([*base, *overrides])

    def start(folder, *overrides, wrap=lambda stage: stage):
        with Heard() as reporter:
            start.lines = reporter.lines
            code = Trainer(load(folder, *overrides), reporter, wrap).fit()
        return code, reporter.lines

    start.load = load
    return start


@pytest.fixture
def generated(monkeypatch):
    """How many responses each call of generation made."""
    calls = []
    inner = Rollout.__call__

    def call(self, batch, at):
        calls.append(len(batch))
        return inner(self, batch, at)

    monkeypatch.setattr(Rollout, "__call__", call)
    return calls


def skip(tmp_path):
    return ["actor_rollout_ref.rollout.skip_rollout=True", f"actor_rollout_ref.rollout.skip_dump_dir={tmp_path}/dump"]


def names(tmp_path):
    return sorted(p.name for p in (tmp_path / "dump").iterdir() if not p.name.startswith("."))


def test_rollout_skip_generates_once_and_loads_call_for_call(train, generated, tmp_path):
    code, lines = train("a", *skip(tmp_path))
    assert code == 0 and generated == [16, 16]
    assert names(tmp_path) == ["e_p_GBS4_N4_0", "e_p_GBS4_N4_1"]
    assert any(line.startswith("rollout skip: folder in use") for line in lines)
    assert sum("no data found at" in line for line in lines) == 2
    assert sum("stored in" in line for line in lines) == 2
    generated.clear()
    code, lines = train("b", *skip(tmp_path), "actor_rollout_ref.actor.optim.lr=5e-3")
    assert code == 0 and generated == []
    assert sum("loaded from" in line for line in lines) == 2


def test_more_calls_than_were_stored_generate_the_rest(train, generated, tmp_path):
    train("a", *skip(tmp_path))
    generated.clear()
    code, lines = train("b", *skip(tmp_path), "trainer.total_training_steps=3")
    assert code == 0 and generated == [16]
    assert names(tmp_path)[-1] == "e_p_GBS4_N4_2"
    assert any("call 2 runs and is stored" in line for line in lines)


def test_calls_of_validation_are_counted_apart(train, generated, demo_files, tmp_path):
    val = [f"data.val_files={demo_files}/val.parquet", "data.val_max_samples=4", "trainer.test_freq=1"]
    train("a", *skip(tmp_path), *val)
    assert names(tmp_path) == [*(f"e_p_GBS4_N4_{i}" for i in range(2)), *(f"val_e_p_GBS4_N4_{i}" for i in range(3))]
    generated.clear()
    train("b", *skip(tmp_path), *val)
    assert generated == []


def test_a_resumed_run_goes_on_with_the_call_where_it_was(train, generated, tmp_path):
    train("a", *skip(tmp_path), "trainer.total_training_steps=3")
    generated.clear()

    class Stop(Exception):
        pass

    def wrap(stage):
        def call(batch, at):
            if at.step == 3:
                raise Stop
            return inner(batch, at)

        if stage.name != "reward":
            return stage
        inner = stage.__call__
        return type("Stopping", (), {"name": stage.name, "reads": stage.reads, "writes": stage.writes,
                                     "__call__": lambda self, batch, at: call(batch, at)})()  # fmt: skip

    options = [*skip(tmp_path), "trainer.total_training_steps=3", "trainer.save_freq=2"]
    with pytest.raises(Stop):
        train("b", *options, wrap=wrap)
    code, lines = train("b", *options)
    assert code == 0 and generated == []
    assert [line.split("GBS4_N4_")[1][0] for line in lines if "loaded from" in line] == ["2"]


def reversed_copy(demo_files, tmp_path):
    table = pq.read_table(demo_files / "train.parquet").slice(0, 8)
    forward, backward = tmp_path / "forward.parquet", tmp_path / "backward.parquet"
    pq.write_table(table, forward)
    pq.write_table(table.take(list(range(8))[::-1]), backward)
    return forward, backward


def test_c01_a_replay_under_another_order_is_refused_and_no_reward_comes_from_a_crossed_pair(
    train, generated, demo_files, tmp_path
):
    forward, backward = reversed_copy(demo_files, tmp_path)
    train("a", *skip(tmp_path), f"data.train_files={forward}", "data.shuffle=False")
    generated.clear()
    with pytest.raises(ReplayRefused, match=r"data\.digest"):
        train("b", *skip(tmp_path), f"data.train_files={backward}", "data.shuffle=False")
    assert generated == []
    # Accepting the setting does not help: these are other samples, and there is nothing to join.
    with pytest.raises(ReplayRefused, match="sample_id"):
        train("c", *skip(tmp_path), f"data.train_files={backward}", "data.shuffle=False", "tape.accept=[data.digest]")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("actor_rollout_ref.rollout.temperature=0.9", "rollout.temperature"),
        ("actor_rollout_ref.rollout.top_p=0.9", "rollout.top_p"),
        ("data.max_response_length=4", "rollout.max_tokens"),
        ("actor_rollout_ref.model.custom_chat_template='{{ messages[0].content }}'", "chat_template.digest"),
        ("actor_rollout_ref.model.override_config={rms_norm_eps: 1e-3}", "model.config.rms_norm_eps"),
    ],
)
def test_a_replay_under_other_sampling_template_or_model_is_refused_before_anything_runs(
    train, generated, tmp_path, override, key
):
    train("a", *skip(tmp_path))
    generated.clear()
    ran = []

    def wrap(stage):
        ran.append(stage.name)
        return stage

    with pytest.raises(ReplayRefused, match=rf"{key}: recorded .*(.|\n)*tape\.accept=\["):
        train("b", *skip(tmp_path), override, wrap=wrap)
    assert generated == [] and ran == []


def test_a_refusal_is_told_once(train, demo_files, tmp_path):
    """The error ends the run, and the command prints it then."""
    forward, backward = reversed_copy(demo_files, tmp_path)
    train("a", *skip(tmp_path), f"data.train_files={forward}", "data.shuffle=False")
    with pytest.raises(ReplayRefused, match="sample_id"):
        train("b", *skip(tmp_path), f"data.train_files={backward}", "data.shuffle=False", "tape.accept=[data.digest]")
    assert not [line for line in train.lines if "could not load" in line or "sample_id" in line]


VAL = "actor_rollout_ref.rollout.val_kwargs"


def test_training_is_replayed_whatever_the_sampling_of_validation_and_the_reverse(
    train, generated, demo_files, tmp_path
):
    val = [f"data.val_files={demo_files}/val.parquet", "data.val_max_samples=4", "trainer.test_freq=2"]
    sampled = [f"{VAL}.do_sample=True", f"{VAL}.temperature=0.5"]
    train("a", *skip(tmp_path), *val)
    generated.clear()
    with pytest.raises(ReplayRefused, match=r"rollout\.val\.temperature: recorded 0\.0, found 0\.5"):
        train("b", *skip(tmp_path), *val, *sampled)
    code, _ = train("c", *skip(tmp_path), *val, *sampled, "trainer.test_freq=-1", "trainer.val_before_train=False")
    assert code == 0 and generated == []
    prints = {}
    for name, overrides in {"a": [], "val": sampled, "train": ["actor_rollout_ref.rollout.temperature=0.9"]}.items():
        trainer = Trainer(train.load("d", "tape.mode=record", *val, *overrides), Heard())
        with trainer.open():
            prints[name] = [trainer.tape.fingerprint("rollout", split) for split in ("train", "val")]
    assert prints["val"][0] == prints["a"][0] and prints["val"][1] != prints["a"][1]
    assert prints["train"][0] != prints["a"][0] and prints["train"][1] == prints["a"][1]


def test_the_key_for_what_cannot_be_stored_reaches_the_tape(train):
    for value in ("refuse", "leave_out"):
        trainer = Trainer(train.load("a", "tape.mode=record", f"tape.unstorable={value}"), Heard())
        with trainer.open():
            assert trainer.tape.tape.options.unstorable == value


def test_an_accepted_difference_is_written_into_the_new_record(train, tmp_path):
    train("a", *skip(tmp_path))
    code, _ = train(
        "b", *skip(tmp_path), "actor_rollout_ref.rollout.temperature=0.9", "tape.accept=[rollout.temperature]",
        "tape.mode=record",
    )  # fmt: skip
    assert code == 0
    header = open_run(tmp_path / "b").record(1, "rollout").header
    assert [m.key for m in header.accepted] == ["rollout.temperature"]


def test_two_runs_have_equal_records_stage_by_stage(train, tmp_path):
    for folder in "ab":
        assert train(folder, "tape.mode=record", "trainer.save_freq=1")[0] == 0
    found = diff_runs(tmp_path / "a", tmp_path / "b")
    assert found.exit_code == 0, found.text()
    a, b = open_run(tmp_path / "a"), open_run(tmp_path / "b")
    assert [a.calls(s) for s in a.steps()] == [b.calls(s) for s in b.steps()]
    for step in a.steps():
        for stage, at in a.calls(step):
            one, two = (run.record(step, stage, at.call).header for run in (a, b))
            assert {k: f.digest for k, f in one.fields.items()} == {k: f.digest for k, f in two.fields.items()}
            assert one.reads.keys() == two.reads.keys()
    train("c", "tape.mode=record", "trainer.seed=2")
    assert diff_runs(tmp_path / "a", tmp_path / "c").exit_code == 1


class Killed(BaseException):
    """Ends a run at once, past every handler of errors."""


def killing(name, step):
    class Kill:
        def __init__(self, stage):
            self.stage, self.name, self.reads, self.writes = stage, stage.name, stage.reads, stage.writes

        def __call__(self, batch, at):
            if at.step == step:
                raise Killed
            return self.stage(batch, at)

    return lambda stage: Kill(stage) if stage.name == name else stage


@pytest.mark.parametrize(("stage", "step"), [("update", 3), ("sync", 2), ("rollout", 4)])
def test_a_run_resumed_in_the_middle_has_the_tape_of_an_uninterrupted_one(train, tmp_path, stage, step):
    options = ["tape.mode=record", "trainer.total_training_steps=4", "trainer.save_freq=2"]
    train("whole", *options)
    with pytest.raises(Killed):
        train("parts", *options, wrap=killing(stage, step))
    assert train("parts", *options)[0] == 0
    whole, parts = open_run(tmp_path / "whole"), open_run(tmp_path / "parts")
    assert whole.steps() == parts.steps() == [0, 1, 2, 3, 4]
    assert [whole.calls(s) for s in whole.steps()] == [parts.calls(s) for s in parts.steps()]
    found = diff_runs(tmp_path / "whole", tmp_path / "parts")
    assert found.exit_code == 0, found.text()


def test_verify_of_an_unchanged_installation_is_bit_equal_for_every_stage(train, tmp_path):
    train("a", "tape.mode=record", "trainer.save_freq=2")
    result = verify(Request(tmp_path / "a"), Heard())
    assert result.first is None
    stages = {c.stage for c in result.comparisons}
    assert stages == {
        "rollout", "reward", "old_log_prob", "ref_log_prob", "advantage", "update", "checkpoint", "sync"
    }  # fmt: skip


def test_verify_starts_from_the_nearest_checkpoint_and_can_be_narrowed(train, tmp_path):
    train("a", "tape.mode=record", "trainer.save_freq=1", "trainer.total_training_steps=3")
    result = verify(Request(tmp_path / "a", stages=("update",), steps=frozenset({3})), Heard())
    assert [(c.stage, c.at.step) for c in result.comparisons] == [("update", 3)]
    assert result.first is None
    result = verify(Request(tmp_path / "a", stages=("reward", "advantage")), Heard())
    assert result.first is None and {c.stage for c in result.comparisons} == {"reward", "advantage"}


def test_verify_names_the_first_stage_that_differs_and_its_token(train, tmp_path, monkeypatch):
    train("a", "tape.mode=record")
    inner = Advantage.__call__

    def faulty(self, batch, at):
        out = inner(self, batch, at)
        if at.step < 2:
            return out
        column = out.ragged("advantages")
        values = column.values.copy()
        values[3] = np.nextafter(values[3], np.float32(9))
        columns = {**out.columns, "advantages": Ragged(values, column.lengths)}
        return Batch(out.sample_id, columns, out.meanings, out.info)

    monkeypatch.setattr(Advantage, "__call__", faulty)
    result = verify(Request(tmp_path / "a"), Heard())
    first = result.first
    assert first is not None and result.stopped == 2
    assert (first.stage, first.at.step, first.field, first.differing) == ("advantage", 2, "advantages", 1)
    assert first.position == 3 and first.sample_id.endswith(".n0")
    assert verify(Request(tmp_path / "a", tolerance={"advantages": 1e-6}), Heard()).first is None


def test_what_verify_is_told_to_accept_comes_on_top_of_what_it_accepts_itself(train, demo_files, tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text((demo_files / "sort_reward.py").read_text())
    train("a", "tape.mode=record", f"reward.custom_reward_function.path={reward}")
    reward.write_text(reward.read_text() + "# another digest\n")
    with pytest.raises(ReplayRefused, match=r"reward\.code"):
        verify(Request(tmp_path / "a", stages=("reward",)), Heard())
    # The later steps' rollouts are loaded on the first weights here, which verify accepts by itself.
    result = verify(Request(tmp_path / "a", stages=("reward",), overrides=("tape.accept=[reward.code]",)), Heard())
    assert result.first is None and [c.at.step for c in result.comparisons] == [1, 2]


def test_verify_of_nothing_is_an_error(train, tmp_path):
    train("plain")
    with pytest.raises(VerifyError, match="holds no records"):
        verify(Request(tmp_path / "plain"), Heard())
    train("a", "tape.mode=record", "tape.stages=[rollout]")
    with pytest.raises(VerifyError, match="'reward' is not recorded"):
        verify(Request(tmp_path / "a", stages=("reward",)), Heard())
    with pytest.raises(VerifyError, match="none of the steps"):
        verify(Request(tmp_path / "a", steps=frozenset({9})), Heard())


def test_a_record_that_cannot_be_written_stops_the_run(train, tmp_path):
    (tmp_path / "blocked").write_text("a file where the tape's folder should be")
    with pytest.raises((TapeError, OSError), match="blocked"):
        train("a", "tape.mode=record", f"tape.dir={tmp_path}/blocked/tape")


def test_only_the_stages_and_steps_asked_for_are_recorded(train, tmp_path):
    train("a", "tape.mode=record", "tape.stages=[rollout,update]", "tape.steps=2")
    tape = open_run(tmp_path / "a")
    assert tape.steps() == [2]
    assert sorted(name for name, _ in tape.calls(2)) == ["rollout", "update"]


# Keys that are read when the configuration is checked and have one value here, or none but in another mode.
READ_AT_LOADING = {
    "actor_rollout_ref.actor.strategy",
    "cluster.sync_timeout",  # test_cluster_runs.py
    "cluster.transport",
    "actor_rollout_ref.rollout.do_sample",
    "actor_rollout_ref.rollout.prompt_length",
    "actor_rollout_ref.rollout.response_length",
    "algorithm.lam",
    "trainer.critic_warmup",
    "trainer.resume_from_path",
    # of an exchange (test_exchange.py) and of the cross-examination
    "trainer.share_data_dir",
    "trainer.share_data_heartbeat",
    "trainer.share_data_keep",
    "cross.env",
    "cross.python",
    "cross.remote",
}


def test_every_documented_key_is_read_by_a_run_that_uses_everything(train, demo_files, tmp_path, monkeypatch):
    """A key that nothing reads looks as if it had an effect: it belongs on the list of keys without one."""
    read = set()

    def watch(cls):
        def get(self, name):
            module = sys._getframe(1).f_globals["__name__"]
            if module.startswith("crossrl.") and not module.startswith("crossrl.config."):
                read.add((cls, name))
            return object.__getattribute__(self, name)

        monkeypatch.setattr(cls, "__getattribute__", get)

    for owner in {leaf.owner for leaf in leaves().values()}:
        watch(owner)
    loaded = train.load(
        "a", *skip(tmp_path), "tape.mode=record", f"data.val_files={demo_files}/val.parquet", "data.val_max_samples=2",
        f"{VAL}.do_sample=True", f"{VAL}.temperature=1.0", "algorithm.use_kl_in_reward=True",
        "algorithm.filter_groups.enable=True", "algorithm.rollout_correction.rollout_is=token",
        "reward.overlong_buffer.enable=True", "reward.overlong_buffer.len=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    )  # fmt: skip
    with open_reporter(loaded) as reporter:
        trainer = Trainer(loaded, reporter)
        trainer.fit()
    apart = train.load("b", "actor_rollout_ref.rollout.name=vllm", "trainer.n_gpus_per_node=2").config
    placement.engine_spec(apart, trainer.parts.tokenizer)
    placement.replica_options(apart)
    placement.ray_settings(apart)
    placement.train_spec(apart)
    assert {path for path, leaf in leaves().items() if (leaf.owner, leaf.name) not in read} == READ_AT_LOADING
