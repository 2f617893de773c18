"""Runs pairs of tiny trainings that exchange halves, and disturbs them; prints what came out as JSON.

A script of its own, because it forks: torch is imported once, and each run starts in a fraction of a second.

    python tests/exchange_cases.py DEMO_FOLDER WORK_FOLDER RANDOM_KILLS
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from resume_cases import KillAt

from crossrl.checkpoint import CheckpointError
from crossrl.config import load_config
from crossrl.report import MetricsFile, Reporter
from crossrl.tape.diff import diff_runs
from crossrl.tape.errors import TapeError
from crossrl.tape.peers import Desk, Role
from crossrl.trainer import Trainer

STEPS = 4
LIMIT_S = 60.0  # of everything that must end by itself
OTHER = {"ckpt": "rollout", "rollout": "ckpt"}


def overrides(demo: Path, folder: Path, share: Path | None, role: str | None, *more: str) -> list[str]:
    """Everything that has state is on, as in ``resume_cases``; both sides of a pair have the same."""
    base = [
        f"data.train_files={demo}/train.parquet", "data.train_max_samples=9", "data.train_batch_size=4",
        "data.max_prompt_length=8", "data.max_response_length=5", f"actor_rollout_ref.model.path={demo}/model",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.shuffle=True", "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.use_kl_loss=True", "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=100", "actor_rollout_ref.rollout.n=4",
        f"reward.custom_reward_function.path={demo}/sort_reward.py", "reward.num_workers=1", "trainer.total_epochs=2",
        "trainer.save_freq=2", "trainer.max_actor_ckpt_to_keep=1", "trainer.val_before_train=False",
        "trainer.num_threads=1", "trainer.device=cpu", f"trainer.default_local_dir={folder}",
    ]  # fmt: skip
    shared = [f"++trainer.share_data={role}", f"++trainer.share_data_dir={share}"] if role else []
    return [*base, *shared, *more]


class Lines(Reporter):
    """Writes what a person would see to the side's log."""

    def message(self, message):
        print(message, flush=True)

    warn = message


def start(demo: Path, folder: Path, share: Path | None, role: str | None, *more: str, kill=None, setup=None) -> int:
    """Fork one side; returns its process id. Exit codes: the run's, or 2 with the error's text in FOLDER.error."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        with folder.with_name(f"{folder.name}.log").open("a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            if setup:
                setup()
            wrap = (lambda s: KillAt(s, *kill[1:]) if s.name == kill[0] else s) if kill else (lambda s: s)
            with Lines(loggers=[MetricsFile(folder / "metrics.jsonl")]) as reporter:
                code = Trainer(load_config(overrides(demo, folder, share, role, *more)), reporter, wrap).fit()
    except (TapeError, CheckpointError) as error:
        folder.with_name(f"{folder.name}.error").write_text(str(error))
        code = 2
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def end(pid: int, limit_s: float = LIMIT_S) -> int | str:
    """The exit code of a side, negative for a signal; "hangs" (and it is killed) when it outlasts the limit."""
    stop = time.monotonic() + limit_s
    while time.monotonic() < stop:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hangs"


def outcome(folder: Path) -> dict[str, object]:
    """Digests of everything that a side ended with, and its curve."""
    last = folder / f"global_step_{STEPS}"
    if not (last / "state.json").is_file():
        return {"digest": "did not finish"}
    names = ("model/model.safetensors", "optimizer.safetensors")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    same = ("critic/rewards/mean", "actor/loss", "actor/grad_norm", "response_length/mean")
    state = json.loads((last / "state.json").read_text())
    return {
        "digest": {n: hashlib.sha256((last / n).read_bytes()).hexdigest() for n in names},
        "curve": [[row["step"], *(row[k] for k in same)] for row in rows],
        "loader": state["loader"], "engine": state["engine"],
    }  # fmt: skip


def pair(demo: Path, work: Path, name: str, order=("ckpt", "rollout"), more=(), kill=None, delay_s=0.0) -> dict:
    """Start both sides; returns their exit codes. ``kill``: role, stage, before or after, step."""
    pids = {}
    for role in order:
        hook = kill[1:] if kill and kill[0] == role else None
        pids[role] = start(demo, work / f"{name}-{role}", work / f"{name}-share", role, *more, kill=hook)
        time.sleep(delay_s)
    return {role: end(pid) for role, pid in pids.items()}


def ends(work: Path, name: str) -> dict:
    return {role: outcome(work / f"{name}-{role}") for role in ("ckpt", "rollout")}


def error(work: Path, name: str, role: str) -> str:
    path = work / f"{name}-{role}.error"
    return path.read_text() if path.exists() else ""


def killed(demo: Path, work: Path, name: str, role: str, after_s: float) -> dict:
    """Kill one side from outside, so long after both have begun; see how the other ends; start both again."""
    other = OTHER[role]
    pids = {r: start(demo, work / f"{name}-{r}", work / f"{name}-share", r) for r in ("ckpt", "rollout")}
    for r in pids:
        appears(work / f"{name}-share" / "peers" / f"{r}.json")
    time.sleep(after_s)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pids[role], signal.SIGKILL)
    begin = time.monotonic()
    first = {role: end(pids[role]), other: end(pids[other])}
    took, reason = time.monotonic() - begin, error(work, name, other)
    again = pair(demo, work, name, order=(other, role))
    left = [p.name for p in (work / f"{name}-share").glob(".*")]
    return {
        "role": role, "first": first, "took_s": took, "reason": reason, "again": again, "left": left,
        **ends(work, name),
    }  # fmt: skip


# Several calls of generation in a step, of another number in each; a second answer to each prompt.
VARIANTS = {
    "dynamic": ["algorithm.filter_groups.enable=True", "data.gen_batch_size=3", "data.train_batch_size=4"],
    "remax": ["algorithm.adv_estimator=remax", "algorithm.use_kl_in_reward=False"],
}


def variant(demo: Path, work: Path, name: str, more: list[str]) -> dict:
    code = end(start(demo, work / f"{name}-alone", None, None, *more))
    codes = pair(demo, work, name, more=more)
    entries = len(list((work / f"{name}-share").glob("rollout_*")))
    return {"alone": code, "straight": outcome(work / f"{name}-alone"), "codes": codes, "entries": entries,
            **ends(work, name)}  # fmt: skip


def appears(path: Path) -> None:
    until(path.exists, f"{path} did not appear")


def until(holds: Callable[[], bool], else_: str) -> None:
    stop = time.monotonic() + LIMIT_S
    while not holds():
        if time.monotonic() > stop:
            raise TimeoutError(else_)
        time.sleep(0.005)


def session(share: Path, role: Role) -> str | None:
    """Of the run that has registered last."""
    found = Desk(share, role).read()
    return found.session if found else None


def disturbed(demo: Path, work: Path, name: str, role: str, disturb, more=(), hook=None) -> dict:
    """Start both sides; once ``rollout_1`` is there call ``disturb(pid of role, share folder)``; see how they end."""
    share = work / f"{name}-share"
    pids = {}
    for r in ("ckpt", "rollout"):
        pids[r] = start(demo, work / f"{name}-{r}", share, r, *more, setup=hook if r == role else None)
    appears(share / "rollout_1")
    disturb(pids[role], share)
    codes = {r: end(pids[r]) for r in (OTHER[role], role)}
    return {"codes": codes, "errors": {r: error(work, name, r) for r in codes}}


def again(demo: Path, work: Path, name: str) -> dict:
    return {"again": pair(demo, work, name), **ends(work, name)}


def no_room() -> None:
    """Every file above 600 kB fails, as on a full disk; the state of the tiny model is 1.3 MB."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000))


def an_hour_ahead() -> None:
    now = time.time
    time.time = lambda: now() + 3600


def stop_forever(pid: int, share: Path) -> None:
    """The other side sees no sign of life; once it has ended, so that this can end as well, nothing stops it."""
    os.kill(pid, signal.SIGSTOP)
    if os.fork() == 0:
        time.sleep(20)
        os.kill(pid, signal.SIGKILL)
        os._exit(0)


def disturbances(demo: Path, work: Path) -> dict[str, object]:
    out: dict[str, object] = {}
    beat = ["trainer.share_data_heartbeat=3"]
    out["stopped"] = disturbed(demo, work, "stopped", "rollout", stop_forever, beat)
    out["interrupted"] = disturbed(demo, work, "interrupted", "ckpt", lambda pid, share: os.kill(pid, signal.SIGINT))
    out["vanished"] = disturbed(
        demo, work, "vanished", "ckpt", lambda pid, share: share.rename(share.with_name("elsewhere"))
    )
    (work / "elsewhere").rename(work / "vanished-share")
    out["vanished"] |= again(demo, work, "vanished")
    pids = {r: start(demo, work / f"full-{r}", work / "full-share", r, setup=no_room if r == "rollout" else None)
            for r in ("ckpt", "rollout")}  # fmt: skip
    out["full"] = {
        "codes": {r: end(pid) for r, pid in pids.items()},
        "errors": {r: error(work, "full", r) for r in pids},
    }
    out["full"] |= again(demo, work, "full")
    pids = {r: start(demo, work / f"skew-{r}", work / "skew-share", r, setup=an_hour_ahead if r == "ckpt" else None)
            for r in ("ckpt", "rollout")}  # fmt: skip
    out["skew"] = {"codes": {r: end(pid) for r, pid in pids.items()}, **ends(work, "skew")}
    keep = ["trainer.share_data_keep=1", "trainer.save_freq=1"]
    out["keep"] = {"codes": pair(demo, work, "keep", more=keep), **ends(work, "keep")}
    out["keep"]["left"] = sorted(p.name for p in (work / "keep-share").iterdir())
    return out


def restarts(demo: Path, work: Path) -> dict[str, object]:
    """What may have changed, or not, when a side is started again."""
    out: dict[str, object] = {}

    def kill(pid: int, share: Path) -> None:
        os.kill(pid, signal.SIGKILL)

    # With another seed: the two belonged together before, and do no more. The side that is right is there first, or the
    # other might come upon its own old entry before it hears of the difference, and name that.
    disturbed(demo, work, "changed", "ckpt", kill)
    limit, share = "trainer.share_data_timeout=20", work / "changed-share"
    before = session(share, "rollout")
    pids = {"rollout": start(demo, work / "changed-rollout", share, "rollout", limit)}
    until(lambda: session(share, "rollout") != before, "the side that trains has not registered")
    pids["ckpt"] = start(demo, work / "changed-ckpt", share, "ckpt", limit, "trainer.seed=2")
    codes = {r: end(p) for r, p in pids.items()}
    out["changed"] = {"codes": codes, "errors": {r: error(work, "changed", r) for r in pids}}
    # Refused for a seed that differs; then mended, and the side that was right all the time is started first.
    wrong = {"ckpt": ["trainer.share_data_timeout=20"], "rollout": ["trainer.seed=2"]}
    pids = {r: start(demo, work / f"mended-{r}", work / "mended-share", r, *more) for r, more in wrong.items()}
    first = {r: end(p) for r, p in pids.items()}
    out["mended"] = {"first": first, "again": pair(demo, work, "mended", delay_s=1.0), **ends(work, "mended")}
    # A verifier that is not quite repeatable: what the trainer has published stays published.
    reward = work / "fickle.py"
    reward.write_text(
        "import random\nfrom crossrl.demo.sort_reward import compute_score as exact\n\n\n"
        "def compute_score(*args, **kwargs):\n"
        "    score = exact(*args, **kwargs)\n"
        "    return (score['score'] if isinstance(score, dict) else score) + 1e-6 * random.random()\n"
    )
    fickle = [f"reward.custom_reward_function.path={reward}"]
    disturbed(demo, work, "fickle", "rollout", kill, fickle)
    out["fickle"] = {"codes": pair(demo, work, "fickle", more=fickle)}
    # Two steps in one exchange, the others in a second one, where a side is killed before its first checkpoint there.
    first = pair(demo, work, "second", more=["trainer.stop_after_steps=2"])
    (work / "second-share").rename(work / "first-share")
    pids = {r: start(demo, work / f"second-{r}", work / "second-share", r) for r in ("ckpt", "rollout")}
    appears(work / "second-share" / "rollout_0")
    kill(pids["ckpt"], work)
    for pid in pids.values():
        end(pid)
    out["second"] = {"first": first, **again(demo, work, "second")}
    out["second"]["entries"] = sorted(p.name for p in (work / "second-share").iterdir())
    return out


def refusals(demo: Path, work: Path) -> dict[str, object]:
    """Exit codes and errors of sides that must not start, or not together."""
    out: dict[str, object] = {}

    def two(name: str, roles: tuple[str, str], second: list[str], share: Path | None = None) -> None:
        share, limit = share or work / f"{name}-share", ["trainer.share_data_timeout=20"]
        first = start(demo, work / f"{name}-1", share, roles[0], *limit)
        time.sleep(0.3)
        other = start(demo, work / f"{name}-2", share, roles[1], *limit, *second)
        codes = [end(other), end(first)]
        texts = [error(work, name, "2"), error(work, name, "1")]
        out[name] = {"codes": codes, "errors": texts}

    two("seed", ("ckpt", "rollout"), ["trainer.seed=2"])
    two("several", ("ckpt", "rollout"), ["actor_rollout_ref.rollout.n=2", "data.max_response_length=4"])
    two("data", ("rollout", "ckpt"), [f"data.train_files={demo}/val.parquet"])
    two("model", ("ckpt", "rollout"), ["actor_rollout_ref.model.override_config.rms_norm_eps=1e-3"])
    two("training", ("ckpt", "rollout"), ["actor_rollout_ref.actor.optim.lr=2e-3", "algorithm.adv_estimator=rloo"])
    # Where pair-share holds a finished exchange: its own sides have nothing to do, others are refused.
    for name, role in (("old", "ckpt"), ("older", "rollout")):
        pid = start(demo, work / f"{name}-1", work / "pair-share", role)
        out[name] = {"codes": [end(pid)], "errors": [error(work, name, "1")]}
    # Entries without their registration, as someone leaves them who removes half of a folder.
    shutil.copytree(work / "pair-share", work / "half-share")
    shutil.rmtree(work / "half-share" / "peers")
    pid = start(demo, work / "half-1", work / "half-share", "ckpt")
    out["half"] = {"codes": [end(pid)], "errors": [error(work, "half", "1")]}
    # A third run, while a pair is at work.
    pids = [start(demo, work / f"third-{r}", work / "third-share", r) for r in ("ckpt", "rollout")]
    appears(work / "third-share" / "rollout_0")
    third = start(demo, work / "third-3", work / "third-share", "rollout")
    out["third"] = {"codes": [end(third), *map(end, pids)], "errors": [error(work, "third", "3")]}
    (work / "file").write_text("")
    pid = start(demo, work / "file-1", work / "file", "ckpt")
    out["file"] = {"codes": [end(pid)], "errors": [error(work, "file", "1")]}
    return out


def main() -> None:
    demo, work, kills = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    tape = ["tape.mode=record"]
    results: dict[str, object] = {"alone": end(start(demo, work / "alone", None, None, *tape)), "kills": []}
    results["straight"] = outcome(work / "alone")
    results["pair"] = {"codes": pair(demo, work, "pair", more=tape), **ends(work, "pair")}
    ends_at = (work / "pair-share" / "peers" / "ckpt.json").stat().st_mtime  # when it said that it had ended
    length_s = ends_at - (work / "pair-share" / "peers" / "ckpt.lock").stat().st_mtime
    results["tapes"] = {r: diff_runs(work / "alone", work / f"pair-{r}").text() for r in ("ckpt", "rollout")}
    late = pair(demo, work, "late", order=("rollout", "ckpt"), delay_s=1.5)
    results["late"] = {"codes": late, **ends(work, "late")}
    results["variants"] = {name: variant(demo, work, name, more) for name, more in VARIANTS.items()}
    results["disturbed"], results["refused"] = disturbances(demo, work), refusals(demo, work)
    results["restarted"] = restarts(demo, work)
    draw = random.Random(7)
    for i in range(kills):
        found = killed(demo, work, f"kill{i}", ("ckpt", "rollout")[i % 2], draw.uniform(0.0, 1.1) * length_s)
        results["kills"].append(found)
        print(i, found["first"], f"{found['took_s']:.1f}", found["reason"][:150], found["again"], file=sys.stderr)
        if not all(found[r] == results["straight"] for r in ("ckpt", "rollout")):
            for path in sorted(work.glob(f"kill{i}-*.log")):
                print(path, path.read_text()[-3000:], sep="\n", file=sys.stderr)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
