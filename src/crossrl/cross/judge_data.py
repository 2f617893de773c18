"""data: the prompts that the examiner's loader draws for a step, against those that the run was given."""

from __future__ import annotations

from collections import Counter

from crossrl.assemble import Parts
from crossrl.batch import Batch
from crossrl.config.root import RunConfig
from crossrl.cross.case import Case
from crossrl.cross.findings import Finding
from crossrl.cross.inputs import NotJudged
from crossrl.cross.measure import describe, judge, measure
from crossrl.stages.base import At
from crossrl.tape.api import RunTape
from crossrl.tape.record import Record


class Draws:
    """The examiner's loader, moved on step by step; its whole state is two numbers."""

    def __init__(self, run: RunTape, parts: Parts, cfg: RunConfig) -> None:
        self.run, self.loader = run, parts.loader
        self.dynamic = cfg.algorithm.filter_groups.enable
        size = cfg.data.train_batch_size
        self.groups = (cfg.data.gen_batch_size or size) if self.dynamic else size
        self.step, self.lost = 0, ""

    def of(self, step: int) -> list[Batch | None]:
        """One batch per call of rollout at ``step``; None where the data are used up.

        Raises ``NotJudged`` when a step before it drew an unknown number of times.
        """
        batches: list[Batch | None] = []
        while self.step < step:
            self.step += 1
            calls = sum(stage == "rollout" for stage, _ in self.run.calls(self.step))
            if not calls and self.dynamic:
                self.lost = f"how often step {self.step} drew prompts is not on the tape (dynamic sampling)"
            batches = [self._next() for _ in range(calls or 1)]
        if self.lost:
            raise NotJudged(self.lost)
        return batches

    def _next(self) -> Batch | None:
        drawn = self.loader.draw(self.groups)
        return self.loader.batch(drawn) if drawn else None


def judge_data(case: Case, record: Record, drawn: Batch | None) -> Finding:
    """The prompts of one call of rollout."""
    fields = [n for n in ("group_id", "prompt_ids", "prompt", "data_source", "ground_truth", "extra_info")
              if n in record.header.fields]  # fmt: skip
    if not fields:
        raise NotJudged("the record of rollout holds no prompts")
    if drawn is None:
        raise NotJudged(f"side {case.by}'s data are used up before this step")
    recorded = record.only(fields)
    recorded = Batch(recorded.sample_id, recorded.columns)
    measured = measure(recorded, drawn.only(fields), "data", At(case.step, record.header.call))
    judged = judge(measured)
    if judged == "equal":
        return case.finding(record, "data", judged, "the prompts are the same, in the same order")
    sentence = _identity(recorded, drawn) or describe(measured)
    return case.finding(record, "data", judged, sentence + _twice(recorded, drawn), measured)


def _identity(recorded: Batch, drawn: Batch) -> str:
    """In words, where the samples themselves are others; "" where they are the same ones in the same order."""
    mine, theirs = set(recorded.sample_id), set(drawn.sample_id)
    if mine == theirs:
        return "" if recorded.sample_id == drawn.sample_id else "the same prompts come in another order"
    texts = [Counter(_texts(batch)) for batch in (recorded, drawn)]
    if texts[0] and texts[0] == texts[1]:
        ids = [sorted(row.tobytes() for row in batch.ragged("prompt_ids").rows()) for batch in (recorded, drawn)]
        if ids[0] != ids[1]:
            return "the same prompts have other token ids: another tokenizer or chat template"
        return "the same prompts come from another data set, whose other rows or whose order differ"
    other = len(mine - theirs)
    return f"{other} of {len(mine)} samples are not those that come next in this side's data, first: " + next(
        s for s in recorded.sample_id if s not in theirs
    )


def _texts(batch: Batch) -> list[str]:
    return [repr(prompt) for prompt in batch["prompt"]] if "prompt" in batch else []


def _twice(recorded: Batch, drawn: Batch) -> str:
    """A group that the run has more often than the examiner."""
    counts = []
    for batch in (recorded, drawn):
        counts.append(Counter(dict(zip(batch["group_id"], _texts(batch), strict=False)).values()))
    more = [text for text, n in counts[0].items() if n > max(1, counts[1].get(text, 0))]
    return f". {len(more)} prompt(s) come more than once in this batch, such as {more[0]:.80}" if more else ""
