"""The children's patches on a real engine: vLLM's spawned engine process. Skipped where vLLM is not installed."""

from __future__ import annotations

import json

import pytest
from patching_cases import run_program

pytest.importorskip("vllm", reason="vLLM is not installed: this runs its engine process, about half a minute each")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TARGET = "vllm.v1.engine.core:EngineCore.add_request"
FIXES = """
import os
from crossrl.patching import Patch

def seen(original):
    def add_request(self, *args, **kwargs):
        with open(os.environ["SEEN"], "a") as file:
            file.write(f"{os.getpid()}\\n")
        return original(self, *args, **kwargs)
    return add_request

PATCHES = (Patch(name="vllm.seen", target="TARGET", fingerprints={"here": "PRINT"}, wrapper=seen, why="a test"),)
"""
PROGRAM = """
import json, os, sys
from pathlib import Path
from crossrl import patching

os.environ.update(
    HF_HUB_OFFLINE="1", TORCHDYNAMO_DISABLE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", VLLM_ENABLE_V1_MULTIPROCESSING="1",
    VLLM_WORKER_MULTIPROC_METHOD="spawn", VLLM_CACHE_ROOT=os.getcwd() + "/cache", SEEN=os.getcwd() + "/seen.txt",
)

def model():
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=1, head_dim=32,
                         num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256)
    LlamaForCausalLM(config).save_pretrained("model")

if __name__ == "__main__":
    model()
    patching.install("fixes:PATCHES")
    if CARRY:
        patching.carry(Path("reports"))
    from vllm import LLM, SamplingParams
    llm = LLM("model", dtype="float32", enforce_eager=True, max_model_len=128, block_size=32, skip_tokenizer_init=True)
    llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False)
    calls = Path("seen.txt").read_text().split() if Path("seen.txt").exists() else []
    reports = patching.reports(Path("reports")).values()
    live = {str(r.pid): r.process for r in reports if all(s.live for s in r.statuses)}
    print(json.dumps({"me": os.getpid(), "calls": [int(c) for c in calls], "live": live}))
"""


@pytest.mark.parametrize("carry", [True, False])
def test_the_spawned_engine_process_has_the_patch(tmp_path, carry):
    from crossrl.patching.listing import fingerprint_of

    (tmp_path / "fixes.py").write_text(FIXES.replace("TARGET", TARGET).replace("PRINT", fingerprint_of(TARGET)))
    done = run_program(tmp_path, PROGRAM.replace("CARRY", str(carry)))
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    if not carry:
        assert said["calls"] == [], "the control: the parent has the patch, the engine does not, and nothing says so"
        return
    assert len(said["calls"]) == 1, "one request, seen once"
    engine = said["calls"][0]
    assert engine != said["me"]
    assert said["live"][str(engine)].startswith("EngineCore")


def test_an_engine_that_was_changed_does_not_start(tmp_path):
    from crossrl.patching.listing import fingerprint_of

    changed = fingerprint_of(TARGET)[:-3] + "000"
    (tmp_path / "fixes.py").write_text(FIXES.replace("TARGET", TARGET).replace("PRINT", "0" * 32 + changed[32:]))
    done = run_program(tmp_path, PROGRAM.replace("CARRY", "True"))
    assert done.returncode == 1
    assert f"PatchRefused: patch vllm.seen refuses {TARGET}: expected fingerprint" in done.stderr
