"""A causal LM as both engines use it: packed where that gives the model's own log-probs, plain where not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from crossrl.models import attention
from crossrl.models.attention import LayoutPattern, Pattern
from crossrl.models.head import Head, log_probs
from crossrl.models.layout import Group, lay_out
from crossrl.models.linear import speed_up
from crossrl.models.loading import switch_dropout_off

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.25, torch.float16: 0.05}


class Policy:
    """``model`` with its packed forward pass, checked against its plain one when constructed.

    ``packed``: None tries packed and falls back with a ``notice``; True makes a failed check an error
    (``UnsupportedAttention``); False uses the plain path. ``notice``: why the plain path is in use, or "".
    """

    def __init__(self, model: PreTrainedModel, packed: bool | None = None) -> None:
        switch_dropout_off(model.config)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        self.model = model.eval()
        speed_up(model)
        self.config: Any = model.config.get_text_config()
        self.packed, self.notice = False, ""
        if packed is not False:
            self.check(self._gap, required=packed is True)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def vocab_size(self) -> int:
        return self.model.get_input_embeddings().weight.shape[0]

    @property
    def max_length(self) -> int | None:
        """The most positions that the model was made for, or None when its config does not say."""
        return getattr(self.config, "max_position_embeddings", None)

    def autocast(self, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
        """Mixed precision on accelerators; nothing on CPU, where bfloat16 is several times slower than float32."""
        if dtype is None or dtype == torch.float32 or self.device.type == "cpu":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=dtype)

    def hidden(self, input_ids: torch.Tensor, position_ids: torch.Tensor, pattern: Pattern) -> torch.Tensor:
        """Final hidden states ``[T, hidden]`` of a packed row ``[1, T]``."""
        # An attention mask of four dimensions is handed through unread: no [T, T] mask is ever made.
        unread = torch.zeros((1, 1, 1, 1), device=input_ids.device)
        keywords: dict[str, Any] = {attention.KEYWORD: pattern}
        out = self.model.base_model(
            input_ids=input_ids, position_ids=position_ids, attention_mask=unread, use_cache=False, **keywords
        )
        return out[0][0]

    def checkpoint_gradients(self) -> None:
        """Recompute each decoder layer in the backward pass instead of keeping its activations."""
        model: Any = self.model
        # transformers renamed this; the old name warns
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        layers = [m for m in self.model.modules() if isinstance(m, GradientCheckpointingLayer)]
        if not layers:
            raise ValueError(f"{type(self.model).__name__} has no layers that support gradient checkpointing")
        for layer in layers:
            layer.training = True  # transformers checkpoints in training mode only; the modules inside stay in eval

    def head(self) -> Head:
        return Head.of(self.model)

    def log_probs(
        self, groups: Sequence[Group], temperature: float, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Of each response token of ``groups``, in order: log-prob, entropy if asked, number of its sequence.

        float32, float32, int64 ``[N]``. Differentiable.
        """
        if not self.packed:
            return self.plain_log_probs(groups, temperature, entropy)
        layout = lay_out(groups).to(self.device)
        hidden = self.hidden(layout.input_ids, layout.position_ids, LayoutPattern(layout))
        values, entropies = log_probs(self.head(), hidden[layout.predict], layout.targets, temperature, entropy)
        return values, entropies, layout.sequence

    def plain_log_probs(
        self, groups: Sequence[Group], temperature: float, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """The same through the model's own forward pass, padded on the right (causal: padding changes nothing)."""
        pairs = [(g.prompt, r) for g in groups for r in g.responses]
        lengths = np.array([len(r) for _, r in pairs], dtype=np.int64)
        longest = max((len(p) + len(r) for p, r in pairs), default=1)
        ids = np.zeros((len(pairs), longest), dtype=np.int64)
        for row, (prompt, response) in zip(ids, pairs, strict=True):
            row[: len(prompt)], row[len(prompt) : len(prompt) + len(response)] = prompt, response
        sequence = np.repeat(np.arange(len(pairs)), lengths)
        first = np.array([len(p) - 1 for p, _ in pairs], dtype=np.int64)
        within = np.concatenate([np.arange(n) for n in lengths]) if len(pairs) else np.zeros(0, np.int64)
        column = first[sequence] + within
        input_ids = torch.from_numpy(ids).to(self.device)
        logits = self.model(input_ids=input_ids, use_cache=False).logits
        index, at = torch.from_numpy(sequence).to(self.device), torch.from_numpy(column).to(self.device)
        log_p = torch.log_softmax(logits[index, at].float() / temperature, -1)
        values = log_p.gather(1, input_ids[index, at + 1][:, None])[:, 0]
        return values, (-(log_p.exp() * log_p).sum(-1) if entropy else None), index

    def generate_plain(
        self, prompts: np.ndarray, max_tokens: int, force: Callable[..., Any], over: Callable[..., Any]
    ) -> None:
        """Run the model's own ``generate`` on ``[B, P]`` prompts of one length; ``force(ids, logits)`` picks the tokens
        (as transformers' logits processors do) and ``over(ids, logits)`` says who has finished."""
        settings = GenerationConfig(do_sample=False, max_new_tokens=max_tokens, pad_token_id=0)
        kept, self.model.generation_config = self.model.generation_config, settings
        try:
            ids = torch.from_numpy(prompts.astype(np.int64)).to(self.device)
            self.model.generate(
                inputs=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=settings,
                logits_processor=[force],
                stopping_criteria=[over],
            )
        finally:
            self.model.generation_config = kept

    def check(self, gap_of: Callable[[], float], required: bool) -> None:
        """Use the packed path if ``gap_of``, which runs it, finds at most a rounding gap to the plain path.

        Else fall back with a ``notice``; ``required``: raise ``UnsupportedAttention`` instead.
        """
        attention.switch(self.model, packed=True)
        self.packed = True
        limit = TOLERANCE.get(self.dtype, 1e-4)
        try:
            gap = gap_of()
            if gap <= limit:
                return
            problem = f"its log-probs differ from the plain ones by {gap:.1e} nat (limit {limit:.0e})"
        except Exception as error:  # whatever a foreign model does with packed input, the plain path is there
            problem = f"{type(error).__name__}: {error}"
        attention.switch(self.model, packed=False)
        self.packed = False
        self.notice = (
            f"{type(self.model).__name__}: the packed forward pass is not usable ({problem}); "
            "using the model's own padded one, which is slower and takes more memory"
        )
        if required:
            raise attention.UnsupportedAttention(self.notice)

    @torch.no_grad()
    def _gap(self) -> float:
        """The largest difference between packed and plain log-probs on a few made-up tokens."""
        draw = np.random.Generator(np.random.Philox(0))
        groups = [
            Group(draw.integers(0, self.vocab_size, p), [draw.integers(0, self.vocab_size, r) for r in rs])
            for p, rs in ((5, (4, 1, 3)), (2, (2,)))
        ]
        plain, _, _ = self.plain_log_probs(groups, 1.0, False)
        packed, _, _ = self.log_probs(groups, 1.0, False)
        return float((plain - packed).abs().max())
