"""``actor_rollout_ref.model``: the policy that is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelConfig:
    path: str | None = None
    """Folder of a Hugging Face causal language model; nothing is downloaded from a hub. Required."""
    tokenizer_path: str | None = None
    """Folder of the tokenizer. null: the model's."""
    trust_remote_code: bool = False
    """Run Python code that the model folder brings along."""
    custom_chat_template: str | None = None
    """Jinja chat template used instead of the tokenizer's."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    use_remove_padding: bool = True
    """Training and sampling in packed form, without padding, where a check at the start finds that it gives the model's
    own log-probs. False: the model's own forward pass and generate, padded, with its own attention."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Entries of the model's config.json to replace, such as {attn_implementation: eager}."""
