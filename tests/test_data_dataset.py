"""Prompts as token ids, over-long prompts, and the digest of a data set."""

import json
import subprocess
import sys

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from crossrl.data.dataset import PromptDataset, PromptOptions, permutation
from crossrl.data.errors import DataError
from crossrl.data.rows import Row
from crossrl.data.tokenize import Template, tokenize, truncate

CHATML = (
    "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}${% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}{% if think is defined and think %}?{% endif %}"
)


def characters(template=None, bos=False):
    """A character tokenizer: one id per character."""
    vocab = {c: i for i, c in enumerate(["<unk>", "<bos>", *"$>0123456789<abcdefghijklmnopqrstuvwxyz? ABC"])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    if bos:
        inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<bos>", eos_token="$")
    tokenizer.chat_template = template
    return tokenizer


def row(prompt, index=0):
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return Row(index, messages, "exact", "1", {}, f"f.jsonl row {index}")


def text_of(tokenizer, ids):
    return "".join(tokenizer.convert_ids_to_tokens(ids.tolist()))


def test_a_plain_prompt_without_a_template_is_exactly_its_tokens():
    tokenizer = characters()
    (ids,) = tokenize([row("524163>")], tokenizer)
    assert ids.dtype == np.int32
    assert text_of(tokenizer, ids) == "524163>"


def test_without_a_template_messages_are_joined_and_the_tokenizers_own_special_tokens_added():
    tokenizer = characters(bos=True)
    (ids,) = tokenize([row([{"role": "system", "content": "ab"}, {"role": "user", "content": "cd"}])], tokenizer)
    assert text_of(tokenizer, ids) == "<bos>abcd"
    with pytest.raises(DataError, match=r"f\.jsonl row 0: a message's content is a list"):
        tokenize([row([{"role": "user", "content": [{"type": "text", "text": "x"}]}])], tokenizer)


def test_the_chat_template_decides_and_asks_for_a_generation():
    tokenizer = characters(CHATML, bos=True)  # no <bos>: special tokens are the template's business
    (ids,) = tokenize([row("12")], tokenizer)
    assert text_of(tokenizer, ids) == "<u>12$<a>"
    (ids,) = tokenize([row("12")], tokenizer, Template(kwargs={"think": True}))
    assert text_of(tokenizer, ids) == "<u>12$<a>?"
    (ids,) = tokenize([row("12")], tokenizer, Template(chat_template="A{{ messages[0]['content'] }}B"))
    assert text_of(tokenizer, ids) == "A12B"
    (ids,) = tokenize([row("12")], characters(), Template(chat_template="A{{ messages[0]['content'] }}B"))
    assert text_of(tokenizer, ids) == "A12B"


def test_a_template_that_refuses_and_an_empty_prompt_name_the_row():
    with pytest.raises(DataError, match=r"f\.jsonl row 3: the chat template refuses the prompt: no system"):
        tokenize([row("a", 3)], characters("{{ raise_exception('no system') }}"))
    with pytest.raises(DataError, match=r"f\.jsonl row 1: the prompt has no tokens"):
        tokenize([row("a", 0), row("", 1)], characters())


def test_prompts_keep_their_order_over_many_chunks():
    tokenizer = characters()
    ids = tokenize([row(str(i), i) for i in range(2500)], tokenizer)
    assert [text_of(tokenizer, one) for one in ids] == [str(i) for i in range(2500)]


@pytest.mark.parametrize(
    ("side", "limit", "want"),
    [("left", 3, [4, 5, 6]), ("right", 3, [1, 2, 3]), ("middle", 3, [1, 5, 6]), ("middle", 4, [1, 2, 5, 6]),
     ("middle", 1, [6]), ("left", 6, [1, 2, 3, 4, 5, 6]), ("right", 9, [1, 2, 3, 4, 5, 6])],
)  # fmt: skip
def test_truncation_loses_tokens_on_the_side_it_names(side, limit, want):
    assert truncate(np.arange(1, 7, dtype=np.int32), limit, side).tolist() == want


def write(path, prompts, answers=None):
    records = [
        {"prompt": p, "data_source": "exact", "reward_model": {"ground_truth": (answers or prompts)[i]}}
        for i, p in enumerate(prompts)
    ]
    path.write_text("\n".join(map(json.dumps, records)))
    return str(path)


PROMPTS = ["1", "22", "333", "4444", "55555"]


def test_filtering_counts_what_it_left_out_and_keeps_row_numbers(tmp_path):
    file = write(tmp_path / "a.jsonl", PROMPTS[::-1])
    data = PromptDataset.load(file, characters(), PromptOptions(3, filter_overlong_prompts=True))
    assert [r.ground_truth for r in data.rows] == ["333", "22", "1"]
    assert [r.index for r in data.rows] == [2, 3, 4]
    assert data.prompt_ids.lengths.tolist() == [3, 2, 1]
    assert str(data.report) == "5 rows read, 2 longer than 3 tokens left out, 3 kept, prompts of 1 to 3 tokens"
    assert data.sources == {"exact": 3}


def test_cutting_counts_what_it_cut(tmp_path):
    data = PromptDataset.load(write(tmp_path / "a.jsonl", PROMPTS), characters(), PromptOptions(3, truncation="left"))
    assert data.prompt_ids.lengths.tolist() == [1, 2, 3, 3, 3]
    assert (data.report.truncated, data.report.filtered, data.report.kept) == (2, 0, 5)
    assert "2 cut to 3 tokens" in str(data.report)


def test_too_long_with_truncation_error_names_row_lengths_and_ways_out(tmp_path):
    with pytest.raises(DataError, match=r"row 3 .*has 4 tokens, data\.max_prompt_length is 3 \(2 of 5 .* has 5\)"):
        PromptDataset.load(write(tmp_path / "a.jsonl", PROMPTS), characters(), PromptOptions(3))


def test_nothing_left_says_why(tmp_path):
    with pytest.raises(DataError, match=r"no prompt is left: 3 rows read.*max_prompt_length=2.*shortest has 3"):
        PromptDataset.load(
            write(tmp_path / "a.jsonl", PROMPTS[2:]), characters(), PromptOptions(2, filter_overlong_prompts=True)
        )


def test_max_samples_takes_the_first_or_a_seeded_subset(tmp_path):
    file = write(tmp_path / "a.jsonl", [str(i) for i in range(100)])
    first = PromptDataset.load(file, characters(), PromptOptions(9, max_samples=10))
    assert [r.index for r in first.rows] == list(range(10))
    assert (first.report.read, first.report.unused, first.report.kept) == (100, 90, 10)
    drawn = [PromptDataset.load(file, characters(), PromptOptions(9, max_samples=10, sample_seed=s)) for s in (1, 1, 2)]
    assert drawn[0].digest == drawn[1].digest != drawn[2].digest
    indices = [r.index for r in drawn[0].rows]
    assert indices == sorted(indices) != list(range(10))


@pytest.mark.parametrize(
    "options", [PromptOptions(0), PromptOptions(3, truncation="up"), PromptOptions(3, max_samples=0)]
)
def test_settings_without_meaning_are_refused(options, tmp_path):
    with pytest.raises(DataError, match="want"):
        PromptDataset.load(write(tmp_path / "a.jsonl", PROMPTS), characters(), options)


def test_the_digest_sees_order_answers_and_tokens_but_not_where_the_file_lies(tmp_path):
    (tmp_path / "sub").mkdir()
    options = PromptOptions(9)

    def digest(name, prompts, answers=None, tokenizer=None):
        return PromptDataset.load(write(tmp_path / name, prompts, answers), tokenizer or characters(), options).digest

    base = digest("a.jsonl", PROMPTS)
    assert digest("sub/b.jsonl", PROMPTS) == base
    other = [
        digest("c.jsonl", PROMPTS[::-1]),
        digest("d.jsonl", PROMPTS, [*PROMPTS[:4], "5"]),
        digest("e.jsonl", PROMPTS, tokenizer=characters(bos=True)),
        digest("f.jsonl", PROMPTS[:4]),
    ]
    assert len({base, *other}) == 5


def test_the_digest_is_the_same_in_another_process(tmp_path):
    code = (
        "import numpy as np; from crossrl.data.dataset import digest; from crossrl.data.rows import Row;"
        "print(digest([Row(0, [], 's', {'b': 1, 'a': 'ü'}, {})], [np.array([1, 2], np.int32)]))"
    )
    digests = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout for _ in range(2)}
    assert len(digests) == 1
    assert len(digests.pop().strip()) == 64


def test_an_order_is_fixed_by_its_seed_for_good():
    assert permutation(8, 1, "data", 0).tolist() == permutation(8, 1, "data", 0).tolist()
    assert sorted(permutation(100, 1, "data", 0).tolist()) == list(range(100))
    # Written down, because recorded runs depend on it: a change here changes every run's data order.
    assert permutation(8, 1, "data", 0).tolist() == [4, 0, 5, 6, 1, 7, 2, 3]
