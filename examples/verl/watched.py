"""Runs of verl under a watchdog: verl hangs when one of its processes fails, so nothing here waits without a limit."""

from __future__ import annotations

import importlib.metadata
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from crossrl.cross.watch import kill_marked

HERE = Path(__file__).resolve().parent
MARK = "CROSSRL_EXAMPLE_RUN"
FATAL = re.compile(r"Error executing job with overrides|RayTaskError|ray\.exceptions\.|The actor died")
RAY_UP, RAY_S = "Started a local Ray instance", 120.0
GRACE_S = 15.0  # after an error in the log, for the run to end by itself


@dataclass(slots=True)
class Run:
    """One verl run in its own folder. ``code``: exit code; None: it was ended by the watchdog, ``why`` says so."""

    name: str
    folder: Path
    process: subprocess.Popen[bytes]
    mark: str
    ray_folder: Path
    began: float = field(default_factory=time.monotonic)
    code: int | None = None
    why: str = ""
    seconds: float = 0.0
    _fatal: float | None = None

    @property
    def log(self) -> str:
        return (self.folder / "log.txt").read_text(errors="replace")

    @property
    def requests(self) -> int:
        """How many requests the rollout has answered."""
        path = self.folder / "requests.txt"
        return len(path.read_text()) if path.exists() else 0

    def poll(self, limit_s: float) -> bool:
        """Whether it has ended; ends it where it takes longer than ``limit_s``, or hangs after an error."""
        code, now = self.process.poll(), time.monotonic()
        if code is None:
            if self._fatal is None and FATAL.search(self.log):
                self._fatal = now
            if now - self.began > limit_s:
                self.why = f"took more than {limit_s:g} s"
            elif self._fatal is not None and now - self._fatal > GRACE_S:
                self.why = "hung after an error"
            if not self.why:
                return False
        self.code, self.seconds = code, now - self.began
        self.end()
        return True

    def end(self) -> None:
        """Kill what is left of this run, and nothing else: processes whose environment has its mark."""
        kill_marked(MARK, self.mark)
        self.process.wait(10)
        shutil.rmtree(self.ray_folder, ignore_errors=True)


def start(
    name: str, work: Path, data: Path, overrides: Sequence[str], environment: Mapping[str, str], steps: int
) -> Run:  # fmt: skip
    """Start real, unmodified ``verl.trainer.main_ppo``: GRPO on the tiny model in ``data``, on a CPU."""
    folder = work / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    mark, ray_folder = f"{name}-{secrets.token_hex(6)}", Path(tempfile.mkdtemp(prefix="rv"))  # Ray's sockets: short
    full = {**surroundings(folder), "RAY_TMPDIR": str(ray_folder), MARK: mark, **environment}
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            command(data, folder, steps, overrides), cwd=folder, env=full, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    run, end = Run(name, folder, process, mark, ray_folder), time.monotonic() + RAY_S
    while RAY_UP not in run.log and process.poll() is None and time.monotonic() < end:
        time.sleep(0.2)  # two that start at once on a busy machine do not get Ray up within the 30 s that it allows
    return run


def surroundings(folder: Path) -> dict[str, str]:
    """The environment of a run in ``folder``."""
    paths = [str(HERE), *vllm_metadata(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ, "PYTHONPATH": os.pathsep.join(paths), "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "verl_cpu,crossrl.hosts.verl", "VERL_CPU_REQUESTS": str(folder / "requests.txt"),
        "HF_HUB_OFFLINE": "1", "HYDRA_FULL_ERROR": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1",
        # Ray gives its own helpers 15 s to start, which a busy machine does not manage.
        "RAY_agent_register_timeout_ms": "120000", "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip


def rollout_arguments(name: str) -> list[str]:
    """For verl's rollout with vLLM (``vllm``) instead of the small one of ``verl_cpu_rollout.py`` (``hf``).

    One request at a time: what is computed beside a request may change its last bits. A seed for each request wants
    prompts in one piece.
    """
    if name == "hf":
        return []
    rollout = "actor_rollout_ref.rollout"
    return [
        f"{rollout}.name=vllm", f"+{rollout}.enable_sleep_mode=False", f"{rollout}.enforce_eager=True",
        f"{rollout}.max_model_len=128", f"{rollout}.max_num_seqs=1", f"{rollout}.enable_chunked_prefill=False",
        f"{rollout}.enable_prefix_caching=False",
    ]  # fmt: skip


def vllm_metadata(folder: Path) -> list[str]:
    """A folder in which the installed ``vllm-cpu`` also has the name ``vllm``, by which verl asks for it.

    With "+cpu" in the version, by which vLLM chooses its platform; without it dies on processors without AVX-512.
    """
    try:
        version = importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return []
    info = folder / f"metadata/vllm-{version}+cpu.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return [str(info.parent)]


def command(data: Path, folder: Path, steps: int, overrides: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "verl.trainer.main_ppo", *_arguments(data, folder, steps), *overrides]


def wait(runs: Sequence[Run], limit_s: float) -> None:
    """Until all have ended. Waits for: the runs. Unblocked by: their end. Time limit: ``limit_s`` for each."""
    left = list(runs)
    try:
        while left:
            left = [run for run in left if not run.poll(limit_s)]
            time.sleep(0.5)
    finally:
        for run in left:
            run.end()


def _arguments(data: Path, folder: Path, steps: int) -> list[str]:
    actor, rollout, init = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "ray_kwargs.ray_init"
    return [
        "algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=False",
        f"data.train_files={data}/train.parquet", f"data.val_files={data}/val.parquet", "data.train_batch_size=4",
        "data.max_prompt_length=64", "data.max_response_length=16", "data.dataloader_num_workers=0", "data.seed=1",
        f"actor_rollout_ref.model.path={data}/model", "actor_rollout_ref.model.use_remove_padding=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        f"{actor}.strategy=fsdp2", "actor_rollout_ref.ref.strategy=fsdp2", f"{actor}.ppo_mini_batch_size=4",
        f"{actor}.ppo_micro_batch_size_per_gpu=4", f"{actor}.use_kl_loss=False", f"{actor}.optim.lr=1e-3",
        f"{actor}.fsdp_config.dtype=float32", f"{actor}.fsdp_config.use_torch_compile=False",
        f"{actor}.use_torch_compile=False",
        f"{rollout}.name=cpu_hf", f"{rollout}.n=2", f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=4", f"{rollout}.dtype=float32",
        f"{rollout}.calculate_log_probs=True", f"{rollout}.agent.num_workers=1", f"{rollout}.free_cache_engine=False",
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes=64",
        f"reward.custom_reward_function.path={HERE}/reward.py", "reward.custom_reward_function.name=compute_score",
        "reward.num_workers=1",
        "trainer.device=cpu", "trainer.n_gpus_per_node=1", "trainer.nnodes=1", "trainer.logger=[console]",
        "trainer.val_before_train=False", "trainer.test_freq=-1", f"trainer.save_freq={steps}",
        f"trainer.total_training_steps={steps}", "trainer.total_epochs=1", "trainer.resume_mode=disable",
        f"trainer.default_local_dir={folder}/out",
        f"{init}.num_cpus=12", f"+{init}.num_gpus=1", f"+{init}.include_dashboard=False",
        f"+{init}.object_store_memory=200000000", f"hydra.run.dir={folder}/hydra",
    ]  # fmt: skip
