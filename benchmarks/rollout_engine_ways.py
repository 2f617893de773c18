"""The engines that ``rollout_engines.py`` compares, each in a process of its own.

Run by it: ``python rollout_engine_ways.py WAY SPEC``. A line of JSON in (tokens per response, number of the round) is
one round; a line out says what it took. A way needs nothing of the others: TRL's needs no crossrl.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Spec = Mapping[
    str, Any
]  # model, eos, prompts (token ids of each request), n (requests of a prompt), new_tokens, threads
Round = Callable[[int, int], Sequence[int]]  # (tokens per response, number of the round) -> lengths of the responses
Way = tuple[Round, Callable[[], Any]]  # what is timed; what is done before it, such as emptying a cache


def seeds(spec: Spec, number: int) -> list[int]:
    return [1 + number * len(spec["prompts"]) + i for i in range(len(spec["prompts"]))]


def hf(spec: Spec) -> Way:
    from crossrl.engines.rollout.spec import EngineSpec, make

    engine = make(EngineSpec("hf", spec["model"], "float32", (spec["eos"],), threads=spec["threads"]))
    return _by_engine(engine, spec), lambda: None


def vllm(spec: Spec) -> Way:
    from crossrl.engines.rollout.vllm import VllmEngine

    engine = VllmEngine(_vllm_options(spec))
    return _by_engine(engine, spec), engine.clear_prefix_cache


def _by_engine(engine: Any, spec: Spec) -> Round:
    import numpy as np

    from crossrl.engines.base import Sampling

    prompts = [np.array(ids, dtype=np.int32) for ids in spec["prompts"]]

    def round_(tokens: int, number: int) -> list[int]:
        out = engine.generate(prompts, seeds(spec, number), Sampling(max_tokens=tokens, ignore_eos=True))
        return out.response_ids.lengths.tolist()

    return round_


def _vllm_options(spec: Spec) -> Any:
    from crossrl.engines.rollout.vllm_options import VllmOptions

    longest = max(map(len, spec["prompts"])) + spec["new_tokens"]
    return VllmOptions(spec["model"], (spec["eos"],), max_model_len=longest, max_num_seqs=len(spec["prompts"]))


def vllm_bare(spec: Spec, plain: bool = False) -> Way:
    import torch
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from crossrl.engines.rollout.vllm_options import engine_arguments

    arguments = engine_arguments(_vllm_options(spec), cpu=not torch.cuda.is_available())
    llm = LLM(**{k: v for k, v in arguments.items() if k != "worker_extension_cls"})
    prompts: Any = [{"prompt_token_ids": ids} for ids in spec["prompts"]]

    def round_(tokens: int, number: int) -> list[int]:
        same = {"temperature": 1.0, "max_tokens": tokens, "ignore_eos": True, "detokenize": False,
                "output_kind": RequestOutputKind.FINAL_ONLY}  # fmt: skip
        each = [{} if plain else {"seed": s, "logprobs": 0, "flat_logprobs": True} for s in seeds(spec, number)]
        outputs = llm.generate(prompts, [SamplingParams(**same, **e) for e in each], use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return round_, llm.reset_prefix_cache


def generate(spec: Spec) -> Way:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(spec["threads"])
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32)
    longest = max(map(len, spec["prompts"]))
    ids = torch.tensor([[spec["eos"]] * (longest - len(p)) + p for p in spec["prompts"]])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in spec["prompts"]])

    def round_(tokens: int, number: int) -> list[int]:
        torch.manual_seed(number)
        model.generation_config = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=tokens, pad_token_id=spec["eos"]
        )
        with torch.inference_mode():
            out = model.generate(input_ids=ids, attention_mask=mask)
        return [out.shape[1] - longest] * len(out)  # without an end token all rows are equally long

    return round_, lambda: None


def trl(spec: Spec) -> Way:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(spec["threads"])
    prompts, tokens = spec["prompts"], spec["new_tokens"]
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32)
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="bench-"), per_device_train_batch_size=len(prompts),
        num_generations=spec["n"], max_completion_length=tokens, temperature=1.0, bf16=False, fp16=False, use_cpu=True,
        gradient_checkpointing=False, report_to=[], generation_kwargs={"min_new_tokens": tokens},
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[lambda completions, **k: [0.0] * len(completions)],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "x"}] * len(prompts)),
        processing_class=AutoTokenizer.from_pretrained(spec["model"]),
    )

    def round_(tokens: int, number: int) -> list[int]:
        torch.manual_seed(number)
        for name in ("min_new_tokens", "max_new_tokens"):
            trainer.generation_kwargs[name] = tokens
            setattr(trainer.generation_config, name, tokens)
        done, _ = trainer._generate_single_turn(prompts, None, {}, spec["n"])  # as of TRL 1.16
        return [len(ids) for ids in done]

    return round_, lambda: None


WAYS: dict[str, Callable[[Spec], Way]] = {
    "hf": hf, "generate": generate, "vllm": vllm, "vllm-bare": vllm_bare,
    "vllm-plain": lambda spec: vllm_bare(spec, plain=True), "trl": trl,
}  # fmt: skip


def serve(way: str, spec: Spec) -> None:
    """A child: a line in (tokens per response, number of the round), a line of JSON out."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not come between
    round_, before = WAYS[way](spec)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        tokens, number = json.loads(line)
        before()
        seconds, cpu = time.perf_counter(), time.process_time()
        lengths = round_(tokens, number)
        seconds, cpu = time.perf_counter() - seconds, time.process_time() - cpu
        if len(lengths) != len(spec["prompts"]) or set(lengths) != {tokens}:
            raise SystemExit(f"{len(lengths)} responses of {sorted(set(lengths))} tokens, want {tokens} each")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(json.dumps({"seconds": seconds, "cpu_seconds": cpu, "peak_gb": peak}), file=answers, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()))
