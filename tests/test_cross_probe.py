"""The probe: one sample through two sides, module by module, to the first whose output differs."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from models_for_tests import CONFIGS, PLAIN_ONLY, tiny
from safetensors.torch import load_file, save_file

from crossrl.cli.main import main
from crossrl.config import load_config
from crossrl.cross.probe.compare import compare_dumps
from crossrl.cross.probe.dump import JSON, TENSORS, Dump, Opened, ProbeError, read_dump, write_dump
from crossrl.cross.probe.judge import judge
from crossrl.cross.probe.rows import FLOAT32, Row, error
from crossrl.cross.probe.side import Request, Side, choose_sample, hear, make_dump, tape_of
from crossrl.cross.probe.sketch import WIDTH, Sink
from crossrl.engines.rollout.hf import HfRolloutEngine
from crossrl.engines.train.fsdp import FsdpTrainEngine
from crossrl.report import Reporter
from crossrl.stages.sync import Sync
from crossrl.sync.carriers import InProcess
from crossrl.trainer import Trainer


@pytest.fixture(scope="module")
def run(demo_files, tmp_path_factory) -> Path:
    """Two recorded steps, with the state after each."""
    folder = tmp_path_factory.mktemp("probe") / "run"
    overrides = [
        f"data.train_files={demo_files}/train.parquet", "data.train_max_samples=8", "data.train_batch_size=4",
        "data.max_prompt_length=8", "data.max_response_length=5", "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        f"actor_rollout_ref.model.path={demo_files}/model", "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.temperature=0.7",
        f"reward.custom_reward_function.path={demo_files}/sort_reward.py", "reward.num_workers=1",
        "trainer.num_threads=1", "trainer.device=cpu", f"trainer.default_local_dir={folder}", "trainer.logger=[]",
        "tape.mode=record", "tape.state=True",
    ]  # fmt: skip
    with Reporter() as reporter:
        assert Trainer(load_config(overrides), reporter).fit() == 0
    return folder


@pytest.fixture
def side(run, tmp_path):
    """``side(**{"cross.plant": ...})``: the run's configuration with these keys changed, as a file."""

    def write(**changes) -> Path:
        body = yaml.safe_load((run / "config.yaml").read_text())
        for key, value in changes.items():
            *groups, last = key.split(".")
            node = body
            for group in groups:
                node = node[group]
            node[last] = value
        file = tmp_path / f"side{len(list(tmp_path.glob('side*.yaml')))}.yaml"
        file.write_text(yaml.safe_dump(body))
        return file

    return write


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, dict[tuple, Path]]:
    """A folder for dumps, and those that are there already: many tests want the same ones."""
    return tmp_path_factory.mktemp("dumps"), {}


@pytest.fixture
def dump(run, made):
    """``dump(**request)``: a dump of the run's step 2, read back."""
    folder, there = made

    def make(**request) -> Opened:
        config = request.get("config")
        key = (*sorted((k, v) for k, v in request.items() if k != "config"), config and config.read_text())
        if key not in there:
            out = folder / str(len(there))
            make_dump(Request(run, **{"step": 2, "out": out, **request}))
            there[key] = out
        return read_dump(there[key])

    return make


@pytest.fixture
def copied(dump, tmp_path) -> Path:
    """A dump that may be damaged."""
    return Path(shutil.copytree(dump().path, tmp_path / "a"))


# Whole sides


@pytest.mark.parametrize("step", [1, 2])
def test_sampler_and_trainer_of_a_healthy_run_are_equal_bit_for_bit_in_every_module(dump, step):
    a, b = dump(way="rollout", step=step), dump(way="train", step=step)
    found = compare_dumps(a, b)
    assert found.exit_code == 0 and found.judged.judgement == "equal" and found.worst.gap == 0
    modules = [row.module for row in found.rows]
    assert {"model.rotary_emb", "model.layers.1.mlp.down_proj", "model.layers.1", "model.norm", "lm_head"} <= set(
        modules
    )
    assert modules.index("model.layers.0.self_attn.q_proj") < modules.index("model.layers.0.self_attn")
    for opened in (a, b):
        assert opened.dump.recorded[opened.dump.way] == opened.log_probs.tolist()
    assert not found.notes


def test_a_dump_made_twice_has_the_same_content(run, dump, tmp_path):
    make_dump(Request(run, 2, tmp_path / "again"))
    assert dump().dump == read_dump(tmp_path / "again").dump


@pytest.mark.parametrize(
    ("fault", "judgement", "module"),
    [
        ("inference.rotary_base", "module", "model.rotary_emb"),
        ("inference.head_bf16", "module", "lm_head"),
        ("inference.stale_weights", "weights", "model.embed_tokens"),
        ("inference.first_token_twice", "tokens", "(input)"),
        ("inference.left_padding_seen", "tokens", "(input)"),
        ("inference.raw_log_probs", "log-probs", None),
    ],
)
def test_a_planted_fault_of_the_engine_is_named(dump, side, fault, judgement, module):
    a, b = dump(way="rollout", config=side(**{"cross.plant": fault})), dump(way="rollout")
    found = compare_dumps(a, b)
    assert (found.judged.judgement, found.judged.module, found.exit_code) == (judgement, module, 1)
    assert a.dump.planted == fault


def test_the_rotary_fault_is_placed_by_token_and_its_table_is_named(dump, side):
    plant = side(**{"cross.plant": "inference.rotary_base"})
    found = compare_dumps(dump(way="rollout", config=plant), dump(way="rollout"))
    row = found.rows[found.judged.at]
    assert 0 not in row.positions and set(range(1, 8)) <= set(row.positions)  # at position 0 nothing is rotated
    assert "model.rotary_emb.inv_freq" in found.judged.sentence
    assert {g.name for g in found.buffers} >= {"model.rotary_emb.inv_freq"} and not found.gaps


def test_a_changed_weight_is_told_from_a_changed_computation(dump, side, demo_files, tmp_path):
    shutil.copytree(demo_files / "model", tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] += 0.5
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    other = side(**{"actor_rollout_ref.model.path": str(tmp_path / "model")})
    found = compare_dumps(dump(step=1), dump(step=1, config=other))
    assert (found.judged.judgement, found.judged.module) == ("weights", "model.layers.1.mlp.up_proj")
    assert [g.name for g in found.gaps] == ["model.layers.1.mlp.up_proj.weight"]
    assert found.rows[found.judged.at].module == "model.layers.1.mlp.up_proj"
    # At step 2 both get the weights of the run, so that the difference is gone.
    assert compare_dumps(dump(), dump(config=other)).judged.judgement == "equal"


def test_another_setting_of_a_module_is_named(dump, side):
    other = side(**{"actor_rollout_ref.model.override_config": {"rms_norm_eps": 1e-2}})
    found = compare_dumps(dump(), dump(config=other))
    assert (found.judged.judgement, found.judged.module) == ("module", "model.layers.0.input_layernorm")


def test_declared_bfloat16_is_rounding_and_its_weights_are_the_same(dump, side):
    half = side(**{"actor_rollout_ref.actor.fsdp_config.model_dtype": "bfloat16"})
    found = compare_dumps(dump(), dump(config=half))
    assert found.numerics.name == "bfloat16" and not found.gaps
    assert (found.judged.judgement, found.exit_code) == ("rounding", 0)
    found = compare_dumps(dump(), dump(config=half), limit=1e-6)
    assert found.exit_code == 1


def test_weights_come_from_a_checkpoint_where_the_tape_has_none(run, dump, tmp_path, monkeypatch):
    from crossrl.checkpoint import CheckpointStore
    from crossrl.cross.probe import side as module
    from crossrl.models.loading import load_causal_lm

    a = dump()
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    for state in copy.glob("tape/*/update.0"):
        shutil.rmtree(state)
    with pytest.raises(ProbeError, match=r"weights before step 2 .*tape\.state=True"):
        make_dump(Request(copy, 2, tmp_path / "none"))
    weights, _ = module._recorded_weights(module.tape_of(run), run, 1)
    model = load_causal_lm(yaml.safe_load((run / "config.yaml").read_text())["actor_rollout_ref"]["model"]["path"])
    model.load_state_dict(weights, strict=False)
    digests = {"weights": "", "optimizer": ""}
    CheckpointStore(copy).save(1, lambda folder: model.save_pretrained(folder / "model"), {}, digests, 0)
    make_dump(Request(copy, 2, tmp_path / "b"))
    b = read_dump(tmp_path / "b")
    assert b.dump.weights_from.endswith("global_step_1/model") and compare_dumps(a, b).judged.judgement == "equal"


def test_the_sample_is_the_one_asked_for_or_the_one_with_the_largest_gap(run, dump):
    tape, default = tape_of(run), dump().dump.sample_id
    gaps = {v.sample_id: max(abs(a - b) for _, _, a, b in v.worst(1)) for v in tape.samples(2)}
    assert default == max(gaps, key=gaps.__getitem__)
    assert choose_sample(tape, 2, default.removeprefix(default[:9])).sample_id == default
    with pytest.raises(ProbeError, match=r"--sample \.n2: 4 samples of step 2 end so"):
        dump(sample=".n2")
    with pytest.raises(ProbeError, match="--sample nobody: 0 samples"):
        dump(sample="nobody")
    short = dump(tokens=2)
    assert len(short.dump.response_ids) == 2 == len(short.log_probs)


# What is refused


def test_dumps_of_other_tokens_are_not_compared(run, dump):
    one = dump()
    other = next(
        i
        for i in read_ids(run)
        if i != one.dump.sample_id and i.rpartition(".")[0] != one.dump.sample_id.rpartition(".")[0]
    )
    with pytest.raises(ProbeError, match="other tokens: prompt_ids differ from position"):
        compare_dumps(one, dump(sample=other))
    with pytest.raises(ProbeError, match="other tokens: response_ids differ from position 2 on"):
        compare_dumps(one, dump(tokens=2))


def read_ids(run: Path) -> tuple[str, ...]:
    from crossrl.tape import open_run

    return open_run(run).record(2, "rollout").sample_id


def test_dumps_of_other_architectures_are_not_compared(dump):
    one = dump()
    calls = tuple(
        dataclasses.replace(c, module=f"transformer.{c.module}") for c in one.dump.calls if c.module[0] != "("
    )
    with pytest.raises(ProbeError, match="no module in common"):
        compare_dumps(one, dataclasses.replace(one, dump=dataclasses.replace(one.dump, calls=calls)))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: flip(d / TENSORS, -1),
        lambda d: (d / TENSORS).write_bytes((d / TENSORS).read_bytes()[:-8]),
        lambda d: (d / TENSORS).unlink(),
        lambda d: (d / JSON).write_text((d / JSON).read_text()[:-20]),
        lambda d: (d / JSON).write_text((d / JSON).read_text().replace('"step": 2', '"step": 3')),
        lambda d: (d / JSON).write_text((d / JSON).read_text().replace("crossrl.probe/1", "crossrl.probe/9")),
        lambda d: (d / JSON).write_bytes(b"\xff\xfe"),
        lambda d: shutil.rmtree(d),
    ],
    ids=["flipped bit", "tensors cut", "no tensors", "json cut", "json changed", "schema", "no text", "nothing"],
)
def test_a_damaged_dump_is_refused(copied, damage):
    assert read_dump(copied).dump.step == 2
    damage(copied)
    with pytest.raises(ProbeError, match=r"a/(dump\.json|tensors\.safetensors)"):
        read_dump(copied)


def test_a_dump_never_overwrites(dump):
    opened = dump()
    with pytest.raises(ProbeError, match="is there already"):
        write_dump(opened.path, opened.dump, opened.kept, opened.log_probs)


# Models of several architectures


def engines(model) -> Side:
    trainer = FsdpTrainEngine(model, None)
    engine = HfRolloutEngine(model, [0])
    return Side(trainer, engine, Sync(InProcess(trainer, engine)))


PROMPT, RESPONSE = np.array([5, 9, 3, 3, 20, 41, 7], np.int32), np.array([8, 1, 60, 33, 2, 19], np.int32)


def heard(parts: Side, way: str) -> Opened:
    """As ``make_dump`` puts it, without a run."""
    out = hear(parts, way, PROMPT, RESPONSE, 1.0)
    made = Dump(
        "run", 1, "s", "side", way, out.policy.packed, "float32", None, "cpu", 1.0, None, {}, "",
        tuple(PROMPT.tolist()), tuple(RESPONSE.tolist()), out.recorder.parameters, out.recorder.buffers, out.calls, {},
    )  # fmt: skip
    return Opened(Path(way), made, out.kept, out.log_probs)


@pytest.mark.parametrize("name", [*CONFIGS, *PLAIN_ONLY])
def test_both_paths_line_up_in_every_architecture(name):
    parts = engines(tiny(name))
    found = compare_dumps(heard(parts, "train"), heard(parts, "rollout"))
    assert found.exit_code == 0, found.judged
    compared = [row for row in found.rows if row.returned is not None]
    assert len(compared) > 10 and compared[-1].module in ("lm_head", "(logits)")


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Granite"])
def test_packed_and_plain_training_line_up(name):
    packed = engines(tiny(name))
    plain = dataclasses.replace(packed, trainer=FsdpTrainEngine(tiny(name), None, packed=False))
    a, b = heard(packed, "train"), heard(plain, "train")
    assert (a.dump.packed, b.dump.packed) == (True, False)
    found = compare_dumps(a, b)
    assert found.exit_code == 0, found.judged
    assert found.rows[-1].module in ("lm_head", "(logits)") and found.rows[-1].returned is not None
    assert any(row.module == "model.layers.1.mlp" and row.returned is not None for row in found.rows)


def test_code_between_modules_is_blamed_on_the_module_around_it():
    right, wrong = tiny(), tiny()
    wrong.model.layers[1].self_attn.scaling *= 1.5
    found = compare_dumps(heard(engines(right), "train"), heard(engines(wrong), "train"))
    assert (found.judged.judgement, found.judged.module) == ("module", "model.layers.1.self_attn")
    assert found.rows[found.judged.at].module == "model.layers.1.self_attn.o_proj"
    assert "hands to model.layers.1.self_attn.o_proj" in found.judged.sentence


def test_a_scale_after_the_head_is_told_from_the_head():
    right, wrong = tiny("Granite"), tiny("Granite")
    wrong.config.logits_scaling = 2.0
    found = compare_dumps(heard(engines(right), "train"), heard(engines(wrong), "train"))
    assert (found.judged.judgement, found.judged.module) == ("module", "(logits)")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_none_is_a_difference(value):
    right, wrong = tiny(), tiny()
    wrong.model.layers[0].mlp.act_fn.register_forward_hook(lambda m, i, out: torch.full_like(out, value))
    found = compare_dumps(heard(engines(right), "rollout"), heard(engines(wrong), "rollout"))
    assert (found.judged.judgement, found.judged.module) == ("module", "model.layers.0.mlp.act_fn")


def test_a_head_that_is_no_longer_tied_is_another_weight():
    right, wrong = tiny(), tiny()
    assert right.lm_head.weight is right.model.embed_tokens.weight
    wrong.lm_head.weight = torch.nn.Parameter(wrong.lm_head.weight.detach() * 1.01)
    found = compare_dumps(heard(engines(right), "train"), heard(engines(wrong), "train"))
    assert found.judged.judgement == "weights" and [g.name for g in found.gaps] == ["lm_head.weight"]


def test_listening_changes_nothing_and_leaves_nothing_behind():
    parts = engines(tiny())
    policy = parts.trainer.policy
    before = heard(parts, "train").log_probs
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in policy.model.modules())
    assert type(policy.head()).__name__ == "Head"
    np.testing.assert_array_equal(before, heard(parts, "train").log_probs)


# What is kept, and the measure


def test_what_is_kept_of_a_wide_tensor_is_bounded_and_estimates_its_error():
    draw = torch.Generator().manual_seed(0)
    a = torch.randn(200, 5000, generator=draw)
    b = a + 1e-3 * torch.randn(200, 5000, generator=draw)
    kept = []
    for rows in (a, b):
        sink = Sink("", 200)
        for part in rows.split(7):
            sink.add(part)
        seen, values = sink.finish()
        assert values.shape == (200, WIDTH) and values.nbytes == 256 * 200 and not seen.full
        assert (seen.rows, seen.shape) == (200, (5000,))
        assert seen.norm == pytest.approx(float(rows.norm()), rel=1e-5) and seen.std == pytest.approx(1.0, rel=1e-2)
        kept.append(values)
    assert np.median(error(*kept)) == pytest.approx(1e-3, rel=0.1)
    assert error(*kept).max() < 2e-3 and error(*kept).min() > 5e-4


def test_a_difference_in_any_single_column_is_seen():
    rows = torch.ones(40, 1000)
    for column in (0, 1, 499, 998, 999):
        other = rows.clone()
        other[:, column] += 1.0
        sinks = [Sink("", 40), Sink("", 40)]
        for sink, each in zip(sinks, (rows, other), strict=True):
            sink.add(each)
        (one, a), (two, b) = (sink.finish() for sink in sinks)
        assert one.digest != two.digest and not one.full
        # The columns' sum of signs is what the equal part leaves, so the scale is that of a sketch of equal columns.
        assert error(a, b).min() > 0.5 / 1000**0.5


def test_rows_have_the_same_digest_however_they_come():
    rows = torch.randn(30, 90)
    digests = set()
    for size in (1, 7, 30):
        sink = Sink("", 30)
        for part in rows.split(size):
            sink.add(part)
        sink.add(torch.zeros(5, 90))  # filler at the end
        digests.add(sink.finish()[0].digest)
    sink = Sink("", 30)
    sink.add(rows.flip(0))
    assert len(digests) == 1 and sink.finish()[0].digest not in digests


def row(order: int, given: float | None, returned: float | None) -> Row:
    return Row(order, f"model.layers.{order}", "Layer", 0, given, returned, (), None, "", "")


def test_a_difference_that_grows_little_by_little_is_no_modules_fault():
    small = [row(i, 1e-7 * 2**i, 2e-7 * 2**i) for i in range(6)]
    assert judge(small, [], [], FLOAT32).judgement == "rounding"
    found = judge([row(i, 1e-7 * 2**i, 2e-7 * 2**i) for i in range(12)], [], [], FLOAT32)
    assert (found.judgement, found.module) == ("drift", "model.layers.9")
    found = judge([*small, row(6, 7e-6, 3e-4)], [], [], FLOAT32)
    assert (found.judgement, found.module) == ("module", "model.layers.6")


# The command


def test_the_command_compares_the_two_paths_of_a_run(run, capsys):
    assert main(["probe", str(run), "--step", "2"]) == 0
    out = capsys.readouterr().out
    assert "are equal bit for bit" in out and "rollout path" in out and "training path" in out


def test_the_command_names_the_module_and_keeps_the_dumps(run, side, tmp_path, capsys):
    wrong = side(**{"cross.plant": "inference.head_bf16"})
    out = tmp_path / "dumps"
    words = ["probe", str(run), "--step", "2", "--config-b", str(wrong), "--path", "rollout", "--out", str(out)]
    assert main(words) == 1
    printed = capsys.readouterr().out
    assert "first module that differs: lm_head" in printed and "planted: inference.head_bf16" in printed
    assert main(["probe", "compare", str(out / "a"), str(out / "b"), "--json"]) == 1
    body = json.loads(capsys.readouterr().out)
    assert (body["judgement"], body["module"]) == ("module", "lm_head") and body["rows"][body["at"]]["positions"]
    assert main(["probe", "compare", str(out / "a"), str(out / "b"), "--tolerance", "0.1"]) == 1  # log-probs still do
    assert "after the model" in capsys.readouterr().out


def test_the_command_takes_two_runs(run, tmp_path, capsys):
    other = tmp_path / "other"
    other.mkdir()
    body = yaml.safe_load((run / "config.yaml").read_text())
    body["actor_rollout_ref"]["model"]["override_config"] = {"rms_norm_eps": 1e-2}
    (other / "config.yaml").write_text(yaml.safe_dump(body))
    assert main(["probe", str(run), str(other), "--step", "2"]) == 1
    assert "first module that differs: model.layers.0.input_layernorm" in capsys.readouterr().out


@pytest.mark.slow  # it starts another interpreter
def test_a_side_with_an_interpreter_and_environment_of_its_own_runs_in_a_process(run, side, capsys):
    mine = side(**{"cross.python": sys.executable, "cross.env": {"OMP_NUM_THREADS": 1}})
    assert main(["probe", str(run), "--step", "2", "--config-b", str(mine)]) == 0
    assert "equal bit for bit" in capsys.readouterr().out
    broken = side(**{"cross.python": "/nowhere/python"})
    assert main(["probe", str(run), "--config-b", str(broken)]) == 2
    assert "cross.python=/nowhere/python" in capsys.readouterr().err


def test_a_run_s_own_folder_cannot_name_a_program_to_start(run, side, tmp_path, capsys):
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    script.chmod(0o755)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.yaml").write_text(side(**{"cross.python": str(script)}).read_text())
    assert main(["probe", str(run), str(other), "--step", "2"]) == 0
    assert not (tmp_path / "started").exists()


def test_a_side_elsewhere_is_told_what_to_run_before_anything_runs(run, side, tmp_path, capsys):
    far, out = side(**{"cross.remote": "ssh gpu7"}), tmp_path / "shared"
    assert main(["probe", str(run), "--step", "2", "--config-b", str(far), "--out", str(out)]) == 2
    assert "ssh gpu7 crossrl probe dump" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dump", "RUN"], "--out DUMP is missing"),
        (["dump", "RUN", "B", "--out", "x"], "2 folders are named"),
        (["compare", "x"], "1 folders are named"),
        (["compare", "x", "y", "--path", "train"], "--path means nothing"),
        (["RUN", "--path", "train"], "--path means nothing"),
        (["RUN", "--config", "x"], "--config means nothing"),
        (["RUN", "--tokens", "0"], "--tokens is 0"),
        (["RUN", "--step", "9"], "has no rollout of step 9"),
        (["RUN", "nowhere"], "nowhere/config.yaml is not there"),
        (["compare", "x", "y"], "x/dump.json is not there"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_reason(run, capsys, words, message):
    assert main(["probe", *(str(run) if word == "RUN" else word for word in words)]) == 2
    assert message in capsys.readouterr().err
