"""Whole runs in one process, on the demo's small model: every algorithm trains, every bad end is a clear one."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from crossrl.assemble import tokenizer_of
from crossrl.checkpoint import CheckpointError
from crossrl.config import load_config
from crossrl.loop import NoSignal
from crossrl.report import MetricsFile, Reporter
from crossrl.resume import ResumeError
from crossrl.trainer import Trainer, TrainingError


class Heard(Reporter):
    """A reporter that keeps what it was told."""

    def __init__(self, folder: Path) -> None:
        super().__init__(loggers=[MetricsFile(folder / "metrics.jsonl")])
        self.warnings: list[str] = []
        self.status = ""

    def warn(self, message: str) -> None:
        self.warnings.append(message)

    def message(self, message: str) -> None:
        pass

    def close(self, ok: bool = True, status: str = "") -> None:
        self.status = self.status or status
        super().close(ok, "")


@pytest.fixture
def run(demo_files, tmp_path):
    """``run(*overrides, folder="run")``: exit code, metrics rows, reporter."""

    def start(*overrides: str, folder: str = "run", wrap=lambda stage: stage, trainer=Trainer):
        target = tmp_path / folder
        base = [
            f"data.train_files={demo_files}/train.parquet", "data.train_max_samples=8", "data.train_batch_size=4",
            "data.max_prompt_length=8", "data.max_response_length=5",
            f"actor_rollout_ref.model.path={demo_files}/model",
            "actor_rollout_ref.actor.optim.lr=1e-3", "actor_rollout_ref.rollout.n=4",
            f"reward.custom_reward_function.path={demo_files}/sort_reward.py", "reward.num_workers=1",
            "trainer.num_threads=1", "trainer.device=cpu", f"trainer.default_local_dir={target}", "trainer.save_freq=2",
        ]  # fmt: skip
        target.mkdir(exist_ok=True)
        with Heard(target) as reporter:
            code = trainer(load_config([*base, *overrides]), reporter, wrap).fit()
        file = target / "metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
        return code, rows, reporter

    start.folder = tmp_path
    return start


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "huggingface" / "model.safetensors")


ALGORITHMS = {
    "grpo": [],
    "dr_grpo": ["algorithm.norm_adv_by_std_in_grpo=False",
                "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm"],
    "rloo": ["algorithm.adv_estimator=rloo"],
    "reinforce_plus_plus": ["algorithm.adv_estimator=reinforce_plus_plus", "algorithm.gamma=0.9"],
    "reinforce_plus_plus_baseline": ["algorithm.adv_estimator=reinforce_plus_plus_baseline"],
    "remax": ["algorithm.adv_estimator=remax"],
    "gspo": ["actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "actor_rollout_ref.actor.ppo_mini_batch_size=2"],
    "cispo": ["actor_rollout_ref.actor.policy_loss.loss_mode=cispo", "actor_rollout_ref.actor.ppo_epochs=2"],
    "kl_loss_and_entropy": ["actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.entropy_coeff=0.01"],
    "kl_in_reward": ["algorithm.use_kl_in_reward=True"],
    "tis_and_mis": ["algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_rs=sequence",
                    "algorithm.rollout_correction.rollout_rs_threshold='0.5_2.0'"],
    "bypass": ["algorithm.rollout_correction.bypass_mode=True"],
    "mask_truncated": ["algorithm.mask_truncated=True", "data.max_response_length=8"],
    "overlong": ["reward.overlong_buffer.enable=True", "reward.overlong_buffer.len=2"],
}  # fmt: skip
NEEDED = (
    "critic/score/mean", "critic/rewards/mean", "actor/entropy", "actor/pg_clipfrac", "actor/grad_norm",
    "actor/ppo_kl", "training/rollout_probs_diff_mean", "response_length/mean", "timing_s/gen",
    "timing_s/update_actor", "timing_s/step",
    "perf/throughput", "actor/lr",
)  # fmt: skip


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_trains_and_reports(run, demo_files, name):
    code, rows, _ = run(*ALGORITHMS[name])
    assert code == 0
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert all(row[key] is not None for key in NEEDED if key in row)
        assert not [key for key in NEEDED if key not in row]
        assert row["training/rollout_log_probs_diff_max"] < 1e-4
    before, after = load_file(demo_files / "model" / "model.safetensors"), weights(run.folder / "run")
    assert any(not torch.equal(before[k], after[k]) for k in before)
    assert all(bool(torch.isfinite(t).all()) for t in after.values())


def test_the_penalty_for_length_is_among_the_metrics_when_asked_for(run):
    overlong = ["reward.overlong_buffer.enable=True", "reward.overlong_buffer.len=4", "data.max_response_length=8"]
    _, rows, _ = run(*overlong, "reward.overlong_buffer.log=True")
    for row in rows:
        penalty = row["reward_extra/overlong_reward/mean"]
        assert -1 <= penalty < 0 and 0 < row["reward_extra/overlong/mean"] <= 1
        assert penalty == pytest.approx(row["critic/rewards/mean"] - row["critic/score/mean"])
    _, rows, _ = run(*overlong, folder="silent")
    assert not [key for key in rows[0] if "overlong" in key]


def test_a_tokenizer_with_code_runs_only_when_model_or_data_allow_it(demo_files, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])  # the library adds that folder
    folder = tmp_path / "model"
    shutil.copytree(demo_files / "model", folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": [None, "mine.Mine"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "mine.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\nclass Mine(PreTrainedTokenizerFast):\n    pass\n"
    )
    base = ["data.train_files=x.parquet", f"actor_rollout_ref.model.path={folder}"]
    for key in ("data.trust_remote_code", "actor_rollout_ref.model.trust_remote_code"):
        assert type(tokenizer_of(load_config([*base, f"{key}=True"]).config)).__name__ == "Mine"
    with pytest.raises(ValueError, match="trust_remote_code"):
        tokenizer_of(load_config(base).config)


def test_kl_to_the_reference_is_in_the_metrics(run):
    _, rows, _ = run("actor_rollout_ref.actor.use_kl_loss=True")
    assert rows[0]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6)
    assert rows[1]["actor/kl_loss"] > 1e-6


def test_two_runs_of_one_configuration_are_bit_equal_and_another_seed_is_not(run):
    run(folder="a")
    run(folder="b")
    run("trainer.seed=2", folder="c")
    a, b, c = (weights(run.folder / name) for name in "abc")
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert any(not torch.equal(a[k], c[k]) for k in a)


def test_dynamic_sampling_trains_on_groups_that_differ_only(run):
    code, rows, _ = run(
        "algorithm.filter_groups.enable=True", "data.train_batch_size=2", "data.gen_batch_size=4",
        "trainer.total_training_steps=2", "algorithm.filter_groups.max_num_gen_batches=0",
    )  # fmt: skip
    assert code == 0
    assert all(row["advantage/groups_all_equal"] == 0 for row in rows)
    assert rows[0]["sampler/draws"] >= 1


def test_no_signal_at_all_stops_dynamic_sampling_with_an_error(run, tmp_path):
    flat = tmp_path / "flat.py"
    flat.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n")
    options = ["algorithm.filter_groups.enable=True", f"reward.custom_reward_function.path={flat}"]
    with pytest.raises(NoSignal, match="all samples score the same"):
        run(*options, "trainer.total_training_steps=2")
    code, _, reporter = run(*options, "trainer.val_before_train=False", folder="epoch")
    assert code == 1 and "no step was done" in reporter.status


def test_equal_rewards_give_a_finite_step_that_changes_nothing_but_decay_and_say_so(run, tmp_path):
    flat = tmp_path / "flat.py"
    flat.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n")
    code, rows, reporter = run(
        f"reward.custom_reward_function.path={flat}", "trainer.total_training_steps=5",
        "actor_rollout_ref.actor.optim.weight_decay=0",
    )  # fmt: skip
    assert code == 0
    assert all(row["actor/grad_norm"] == 0 and row["actor/skipped_samples"] == 16 for row in rows)
    assert any("no group had different rewards for 5 steps" in w for w in reporter.warnings)


def test_rewards_that_fail_are_counted_named_and_left_out(run, tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if len(solution_str) % 2:\n        raise ValueError('odd answer')\n    return float(len(solution_str))\n"
    )
    code, rows, reporter = run(f"reward.custom_reward_function.path={bad}")
    assert code == 0
    assert rows[0]["reward/raised"] + rows[0]["reward/ok"] == 16
    assert rows[0]["actor/masked_sequences"] == rows[0]["reward/raised"] > 0
    assert any("odd answer" in w for w in reporter.warnings)


def test_when_every_response_is_cut_off_and_masked_the_loss_is_zero_and_it_is_reported(run):
    code, rows, _ = run("algorithm.mask_truncated=True", "data.max_response_length=1")
    assert code == 0
    cut = [row for row in rows if row["response_length/clip_ratio"] == 1.0]
    assert cut and all(row["actor/loss"] == 0.0 and row["actor/masked_sequences"] == 16 for row in cut)


def test_the_learning_rate_follows_the_schedule(run):
    _, rows, _ = run(
        "trainer.total_training_steps=4", "actor_rollout_ref.actor.optim.lr_scheduler_type=linear",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=2",
    )  # fmt: skip
    assert [row["actor/lr"] for row in rows] == pytest.approx([0.0, 5e-4, 1e-3, 5e-4])


def test_retention_keeps_the_newest_and_only_after_it_is_complete(run):
    run("trainer.total_training_steps=6", "trainer.max_actor_ckpt_to_keep=2")
    assert sorted(p.name for p in (run.folder / "run").glob("global_step_*")) == ["global_step_4", "global_step_6"]
    assert (run.folder / "run" / "latest_checkpointed_iteration.txt").read_text() == "6"


def test_a_full_disk_leaves_the_older_checkpoint_and_says_so(run, monkeypatch):
    run(folder="full")
    full = SimpleNamespace(free=10)
    monkeypatch.setattr("crossrl.checkpoint.shutil.disk_usage", lambda path: full)
    with pytest.raises(CheckpointError, match="MB needed, 0 MB free"):
        run("trainer.total_training_steps=4", folder="full")
    assert (run.folder / "full" / "global_step_2" / "manifest.json").is_file()


def test_a_changed_checkpoint_is_refused_by_name(run):
    run(folder="changed")
    file = run.folder / "changed" / "global_step_2" / "model" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors was changed"):
        run("trainer.total_training_steps=4", folder="changed")


def test_starting_over_an_existing_run_is_refused(run):
    run(folder="there")
    with pytest.raises(ResumeError, match="would start over"):
        run("trainer.resume_mode=disable", folder="there")


def test_resuming_with_other_data_is_refused(run):
    run(folder="data")
    with pytest.raises(ValueError, match="cannot resume in the middle of other data"):
        run("data.train_max_samples=12", "trainer.total_training_steps=4", folder="data")


def test_resume_from_a_path_goes_on_in_another_folder(run):
    run("trainer.total_training_steps=4", folder="whole")
    code, _, _ = run(
        "trainer.total_training_steps=4", "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={run.folder}/whole/global_step_2", folder="branch",
    )  # fmt: skip
    assert code == 0
    a, b = weights(run.folder / "whole"), weights(run.folder / "branch")
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_two_runs_in_one_folder_at_a_time_are_refused(run):
    def wrap(stage):
        if stage.name == "reward":
            with pytest.raises(TrainingError, match="another run is writing"):
                run(folder="shared")
        return stage

    assert run(folder="shared", wrap=wrap)[0] == 0


def test_a_planned_step_that_was_not_done_makes_the_exit_code_non_zero(run):
    class Short(Trainer):
        """Its data end before the planned steps do."""

        def sampler(self):
            self.parts.loader.total_epochs = 1
            return super().sampler()

    code, _, reporter = run("trainer.total_training_steps=5", trainer=Short)
    assert code == 1
    assert reporter.status == "stopped after 2 of 5 planned steps: the data are used up"


def test_remax_validates(run, demo_files):
    val = [f"data.val_files={demo_files}/val.parquet", "data.val_max_samples=4", "trainer.test_freq=1"]
    code, rows, _ = run("algorithm.adv_estimator=remax", "actor_rollout_ref.rollout.n=1", *val)
    assert code == 0
    assert [row["step"] for row in rows if any(k.startswith("val-core/") for k in row)] == [0, 1, 2]


def test_gradient_checkpointing_recomputes_in_a_real_run_and_gives_the_same_weights(run, monkeypatch):
    import transformers.modeling_utils

    calls = []
    inner = transformers.modeling_utils.checkpoint
    monkeypatch.setattr(transformers.modeling_utils, "checkpoint", lambda *a, **k: calls.append(1) or inner(*a, **k))
    run("actor_rollout_ref.model.enable_gradient_checkpointing=True", folder="less")
    assert calls
    calls.clear()
    run(folder="plain")
    assert not calls
    a, b = weights(run.folder / "less"), weights(run.folder / "plain")
    assert all(torch.allclose(a[k], b[k], atol=1e-5) for k in a)


def test_a_kill_after_the_last_checkpoint_loses_neither_the_export_nor_the_last_validation(run, demo_files):
    val = [f"data.val_files={demo_files}/val.parquet", "data.val_max_samples=4", "trainer.test_freq=2"]

    class Dies(Trainer):
        def validate(self):
            if self.done:
                raise KeyboardInterrupt
            super().validate()

    with pytest.raises(KeyboardInterrupt):
        run(*val, "tape.mode=record", trainer=Dies)
    assert not (run.folder / "run" / "huggingface").exists()
    code, rows, _ = run(*val, "tape.mode=record")
    assert code == 0 and (run.folder / "run" / "huggingface" / "model.safetensors").is_file()
    assert [row["step"] for row in rows if any(k.startswith("val-core/") for k in row)] == [0, 2]
    assert run(*val, "tape.mode=record")[2].status.startswith("nothing to do")


def test_an_earlier_export_stays_until_the_new_one_is_complete(run, monkeypatch):
    run(folder="export")
    before = weights(run.folder / "export")

    def full(*args):
        raise OSError("no space left")

    monkeypatch.setattr("crossrl.engines.train.fsdp.FsdpTrainEngine.save_hf", full)
    with pytest.raises(TrainingError, match="no space left"):
        run("trainer.total_training_steps=3", folder="export")
    after = weights(run.folder / "export")
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_a_prompt_that_cannot_fit_the_model_is_refused_at_the_start(run):
    from crossrl.engines.base import EngineError

    with pytest.raises(EngineError, match=r"7 \+ 60 = 67.*at most 57"):
        run("data.max_response_length=60")


def test_a_loss_that_is_not_finite_stops_before_the_weights_change(run, demo_files):
    from crossrl.engines.base import EngineError

    class Poison:
        def __init__(self, stage):
            self.stage, self.name, self.reads, self.writes = stage, stage.name, stage.reads, stage.writes

        def __call__(self, batch, at):
            out = self.stage(batch, at)
            out.ragged("advantages").values[:] = 3e38
            return out

    with pytest.raises(EngineError, match=r"not finite|is inf|is nan"):
        run(wrap=lambda s: Poison(s) if s.name == "advantage" else s)
