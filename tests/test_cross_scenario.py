"""The 2x2 logic on curves alone: every branch, what is missing, and what must not be blamed."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

import pytest
from cross_cases import arm, arms, metrics

from crossrl.cli.main import parse
from crossrl.cross.arms import Arm
from crossrl.cross.next_steps import NextSteps
from crossrl.cross.scenario import Scenario, scenario

BAD = {"reward": (31, -0.3)}


def said(**given) -> Scenario:
    found = scenario(arms(**given), NextSteps())
    assert found is not None
    return found


def text(found: Scenario) -> str:
    return " ".join([*(e.sentence for e in found.evidence), *found.notes])


def test_what_goes_wrong_with_the_inference_of_a_is_inference():
    found = said(AA=metrics(1, **BAD), AB=metrics(2, **BAD), BA=metrics(3))
    assert (found.conclusion, found.candidates[0], found.differs) == ("inference", "inference", True)
    assert set(found.candidates) == {"inference", "weight sync", "data"}
    assert found.step is not None and 30 <= found.step <= 33
    assert not found.todo


def test_what_goes_wrong_with_the_training_of_a_is_training_and_reward_would_look_the_same():
    found = said(AA=metrics(1, **BAD), AB=metrics(2), BA=metrics(3, **BAD))
    assert (found.conclusion, set(found.candidates)) == ("training", {"training", "reward"})
    assert "the side that trains scores" in text(found)


def test_both_pairs_is_several():
    found = said(AA=metrics(1, **BAD), AB=metrics(2, **BAD), BA=metrics(3, **BAD))
    assert (found.conclusion, found.candidates) == ("several", ("inference", "training"))


def test_neither_pair_cannot_be_told_and_says_why_and_what_to_run():
    found = said(AA=metrics(1, **BAD), AB=metrics(2), BA=metrics(3))
    assert found.conclusion == "not distinguishable" and found.differs
    assert "It takes both together, or a sync that fails" in text(found)
    assert any(c.startswith("crossrl examine ") for c in found.todo)


def test_no_difference_is_no_difference():
    found = said(AA=metrics(1), AB=metrics(2), BA=metrics(3))
    assert (found.conclusion, found.differs, found.candidates) == ("no difference", False, ())
    assert said(AA=metrics(1)).conclusion == "no difference"  # A alone as B alone: no pair is needed


def test_differences_within_the_noise_are_never_blamed():
    for seed in range(10, 30, 3):
        found = said(AA=metrics(seed), AB=metrics(seed + 1), BA=metrics(seed + 2))
        assert found.conclusion == "no difference", seed


def test_a_pair_is_asked_for_what_a_alone_shows_not_for_anything():
    """BA's entropy is higher: that is nothing that A alone shows, so it is not what went wrong there."""
    found = said(AA=metrics(1, **BAD), AB=metrics(2, **BAD), BA=metrics(3, entropy=(1, 0.5)))
    assert found.conclusion == "inference"
    opposite = said(AA=metrics(1, **BAD), AB=metrics(2, **BAD), BA=metrics(3, reward=(31, 0.3)))
    assert opposite.conclusion == "inference"


def test_the_most_telling_symptom_decides_and_others_are_asked_when_it_does_not():
    both = {"reward": (31, -0.3), "entropy": (31, 0.5)}
    found = said(AA=metrics(1, **both), AB=metrics(2, entropy=(31, 0.5)), BA=metrics(3, **BAD))
    assert found.conclusion == "training"
    found = said(AA=metrics(1, **both), AB=metrics(2, entropy=(31, 0.5)), BA=metrics(3))
    assert found.conclusion == "inference"


def test_pairs_that_differ_while_a_alone_does_not_are_at_fault_themselves():
    found = said(AA=metrics(1), AB=metrics(2, **BAD), BA=metrics(3))
    assert found.conclusion == "not distinguishable" and found.differs is False
    assert "the exchange is at fault" in text(found) and found.todo


def test_missing_pairs_are_named_with_the_commands_that_make_them():
    found = said(AA=metrics(1, **BAD))
    assert found.conclusion == "not distinguishable"
    assert "AB (inference of A, training of B) is missing" in text(found)
    commands = "\n".join(found.todo)
    assert commands.count("share_data=ckpt") == commands.count("share_data=rollout") == 2
    assert found.todo[-1].endswith("--ab outputs/AB --ba outputs/BA")


def test_one_pair_that_shows_it_is_enough_and_one_that_does_not_is_not():
    shows = said(AA=metrics(1, **BAD), AB=metrics(2, **BAD))
    assert shows.conclusion == "inference" and "BA (inference of B, training of A) is missing" in text(shows)
    assert shows.todo  # B's half may be at fault as well
    not_shown = said(AA=metrics(1, **BAD), AB=metrics(2))
    assert not_shown.conclusion == "not distinguishable" and "points to training" in text(not_shown)
    other = said(AA=metrics(1, **BAD), BA=metrics(2))
    assert other.conclusion == "not distinguishable" and "points to inference" in text(other)


def test_pairs_alone_locate_a_fault_without_a_run_of_a():
    assert said(AB=metrics(2, **BAD), BA=metrics(3)).conclusion == "inference"
    assert said(AB=metrics(2), BA=metrics(3, **BAD)).conclusion == "training"
    nothing = said(AB=metrics(2), BA=metrics(3))
    assert nothing.conclusion == "not distinguishable" and any("outputs/AA" in c for c in nothing.todo)


def test_too_few_steps_claim_nothing_and_say_how_many_are_needed():
    found = said(AA=metrics(1, 10, reward=(5, -0.3)), AB=metrics(2, 10), BA=metrics(3, 10))
    assert (found.conclusion, found.differs) == ("not distinguishable", None)
    assert "AA and BB have 10 steps in common: too short. 20 are needed." in text(found)
    assert any(c.endswith("--out outputs/cross-40-steps --steps 40") for c in found.todo)


def test_bit_equal_pairs_say_so_at_any_length():
    bb = metrics(0, 10)
    found = said(AA=metrics(1, 10), BB=bb, AB=bb, BA=metrics(3, 10))
    assert "AB is BB bit for bit in 10 steps: A's inference half changes nothing." in text(found)
    assert said(AA=bb, BB=bb).conclusion == "no difference"


def test_a_run_that_stopped_is_evidence_without_statistics():
    stopped = arm("AA", metrics(1, 8), "failed", "it stopped after step 8 of 60, before its end")
    dead = arm("BA", metrics(3, 9), "failed", "it stopped after step 9 of 60, before its end")
    found = said(AA=stopped, AB=metrics(2), BA=dead)
    assert (found.conclusion, found.step) == ("training", 9)
    assert any(e.source == "failure" and "stopped after step 8" in e.sentence for e in found.evidence)
    assert "start it again" in text(found)


def test_non_finite_values_and_a_vanished_signal_are_failures():
    nan = metrics(1)
    nan["actor/grad_norm"][40] = math.nan
    found = said(AA=nan, AB=metrics(2, **BAD), BA=metrics(3))
    assert (found.conclusion, found.step) == ("inference", 40)  # it fails in its own way: the reward goes
    flat = metrics(1)
    flat["actor/grad_norm"] |= dict.fromkeys(range(41, 61), 0.0)
    assert said(AA=flat, AB=metrics(2), BA=flat).conclusion == "training"


def solved(seed: int, steps: int = 60) -> dict[str, dict[int, float]]:
    """Rewards rise to 1, and from step 41 on there is nothing left to learn from."""
    found = metrics(seed, steps, reward=(21, 0.5))
    found["actor/grad_norm"] |= dict.fromkeys(range(41, steps + 1), 0.0)
    return found


def test_having_solved_the_task_is_no_failure_of_either_side():
    ahead = metrics(2, reward=(21, 0.48))  # as good, and still at it
    for aa, bb in ((solved(1), ahead), (ahead, solved(1)), (solved(1), solved(3))):
        assert said(AA=aa, BB=bb).conclusion == "no difference"
    found = said(AA=metrics(1, **BAD), AB=metrics(2, reward=(21, 0.5)), BA=metrics(3, **BAD), BB=solved(0))
    assert found.conclusion == "training"  # the reference has solved it, A has not


def test_having_nothing_to_learn_from_at_a_lower_reward_is_a_failure_of_the_reference_too():
    dead = metrics(1)
    dead["actor/grad_norm"] |= dict.fromkeys(range(41, 61), 0.0)
    assert "and a higher reward" in text(said(AA=dead, BB=metrics(2, reward=(21, 0.5))))
    assert "failed itself" in text(said(AA=metrics(2, reward=(21, 0.5)), BB=dead))  # A is better
    never = metrics(1)
    never["actor/grad_norm"] = dict.fromkeys(range(1, 61), 0.0)
    assert "failed itself" in text(said(AA=never, BB=never))  # nothing was ever learned


def test_pairs_that_never_ran_are_missing_and_no_symptom():
    absent = {n: Arm(n, (Path(n),), None, "missing", "it never ran: refused") for n in ("AB", "BA")}
    found = said(AA=metrics(1, **BAD), **absent)
    assert (found.conclusion, found.candidates) == ("not distinguishable", ())
    assert "AB (inference of A, training of B) is missing: it never ran: refused." in text(found)


def test_what_is_not_finite_in_the_reference_too_is_no_failure():
    nan, base = metrics(1), metrics(0)
    for each in (nan, base):
        each["actor/loss"] = dict.fromkeys(range(1, 61), math.nan)
    assert said(AA=nan, BB=base).conclusion == "no difference"


def test_a_reference_that_failed_itself_is_no_reference():
    base = arm("BB", metrics(0, 30), "failed", "it stopped after step 30 of 60, before its end")
    found = said(AA=metrics(1, **BAD), BB=base)
    assert found.conclusion == "not distinguishable" and "failed itself" in text(found) and found.todo


def test_a_running_arm_is_judged_so_far_and_said_to_be_running():
    found = said(AA=arm("AA", metrics(1), "running"), AB=metrics(2), BA=metrics(3))
    assert found.conclusion == "no difference" and "AA is still running" in text(found)


def test_nothing_in_common_is_not_a_comparison():
    assert scenario(arms(), NextSteps()) is None
    assert scenario({"BB": arm("BB", None), "AA": arm("AA", metrics(1))}, NextSteps()) is None
    found = said(AA=arm("AA", {"my/score": dict.fromkeys(range(60), 1.0)}))
    assert found.conclusion == "not distinguishable" and "--metric NAME" in text(found)


@pytest.mark.parametrize("more", [(), ("my/score",)])
def test_other_metrics_are_compared_when_asked_for(more):
    bad, good = ({**metrics(s), "my/score": dict.fromkeys(range(1, 61), v)} for s, v in ((1, 0.0), (2, 9.0)))
    found = scenario(arms(AA=bad, BB={**good}, AB=good, BA=bad), NextSteps(), "float32", more)
    assert found is not None and found.conclusion == ("training" if more else "no difference")


def test_commands_use_the_configurations_that_are_known():
    steps = NextSteps(Path("out"), "out/sides/a.yaml", "out/sides/b.yaml")
    assert steps.arm("AB") == ("crossrl cross --a out/sides/a.yaml --b out/sides/b.yaml --out out",)
    by_hand = NextSteps(None, "a.yaml", None)
    assert by_hand.arm("AB")[0].startswith("crossrl train --config-name a.yaml ++trainer.share_data=ckpt ")
    assert by_hand.arm("AB")[1].endswith("trainer.default_local_dir=outputs/AB/train   # settings of B")


def test_every_proposed_command_parses():
    for steps in (NextSteps(), NextSteps(Path("out"), "out/sides/a.yaml", "out/sides/b.yaml")):
        commands = [*steps.arm("AB"), *steps.arm("BB2"), *steps.longer(40), *steps.examine(), *steps.examine_to(5)]
        for command in [*commands, steps.whole(), steps.again("AB")]:
            words = shlex.split(command, comments=True)
            assert words[0] == "crossrl"
            assert parse([w for w in words[1:] if w not in ("KEY=VALUE", "...")]).run
