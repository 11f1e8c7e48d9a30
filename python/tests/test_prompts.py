"""Prompts to token rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sluice
from sluice.integrations.prompts import JsonLines, Line, Refusal, Row, count_rows, rows_of

pytest.importorskip("torch", reason="the stand-in for a tokenizer lies beside a model of torch")

from .standin import SPECIALS, Tokenizer  # noqa: E402

HI = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
LONG = [{"role": "system", "content": "Be."}, *HI, {"role": "user", "content": "So?"}, {"role": "assistant", "content": "No"}, {"role": "user", "content": "bye"}]


def text(row: Row | Refusal, mask: int) -> str:
    assert isinstance(row, Row), row
    names = {i: name for name, i in SPECIALS.items()}
    return "".join(names.get(i, chr(i)) for i, m in zip(row.input_ids, row.loss_mask, strict=True) if m == mask)


def test_a_row_an_assistant_turn_with_the_mask_on_what_the_answer_adds() -> None:
    rows = list(rows_of({"messages": LONG}, Tokenizer()))
    assert len(rows) == 2 == count_rows({"messages": LONG}, "each")
    assert text(rows[0], 0) == "<bos><system>Be.<end><user>Hi<end><assistant>" and text(rows[0], 1) == "Yo<end>"
    assert text(rows[1], 0) == "<bos><system>Be.<end><user>Hi<end><assistant>Yo<end><user>So?<end><assistant>" and text(rows[1], 1) == "No<end>"


def test_all_assistant_turns_in_one_row() -> None:
    (row,) = rows_of({"messages": LONG}, Tokenizer(), turns="whole")
    assert count_rows({"messages": LONG}, "whole") == 1
    assert text(row, 1) == "Yo<end>No<end>" and text(row, 0) == "<bos><system>Be.<end><user>Hi<end><assistant><user>So?<end><assistant>"


def test_sharegpt_is_read_as_messages_are() -> None:
    shared = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]
    assert list(rows_of({"conversations": shared}, Tokenizer())) == list(rows_of({"messages": HI}, Tokenizer()))


def test_a_prompt_that_is_no_prefix_of_the_answer_is_refused() -> None:
    class Merging(Tokenizer):
        """Joins the last token of the prompt with the first of the answer."""

        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            return super().__call__(text.replace("<assistant>Y", "\x01"), add_special_tokens)

    (row,) = rows_of({"messages": HI}, Merging())
    assert isinstance(row, Refusal) and row.reason == "boundary" and "no prefix" in row.detail
    ok = [HI[0], {"role": "assistant", "content": "Ja"}]
    assert isinstance(next(rows_of({"messages": ok}, Merging())), Row)


def test_a_template_that_rewrites_earlier_turns_serves_turn_by_turn_and_not_whole() -> None:
    class Thinks(Tokenizer):
        thinks = True

    turns = [HI[0], {"role": "assistant", "content": "(hm)Yo"}, HI[0], {"role": "assistant", "content": "(so)Ja"}]
    each = list(rows_of({"messages": turns}, Thinks()))
    assert [text(r, 1) for r in each] == ["(hm)Yo<end>", "(so)Ja<end>"] and "(hm)" not in text(each[1], 0)
    (whole,) = rows_of({"messages": turns}, Thinks(), turns="whole")
    assert isinstance(whole, Refusal) and whole.reason == "boundary"


def test_what_the_template_does_not_take_is_refused_with_its_words() -> None:
    (row,) = rows_of({"messages": [{"role": "judge", "content": "x"}, *HI]}, Tokenizer())
    assert isinstance(row, Refusal) and row.reason == "template" and "unknown role judge" in row.detail
    (row,) = rows_of({"messages": HI[:1]}, Tokenizer())
    assert isinstance(row, Refusal) and row.reason == "unsupervised"


def test_text_is_supervised_throughout() -> None:
    (row,) = rows_of("Yes.", Tokenizer())
    assert text(row, 1) == "<bos>Yes." and next(rows_of({"text": "Yes."}, Tokenizer())) == row


def test_token_ids_are_taken_as_they_are_and_padding_is_cut() -> None:
    (row,) = rows_of({"input_ids": [5, 6, 7, 0], "loss_mask": [0, 1, 1, 0], "attention_mask": [1, 1, 1, 0], "messages": HI})
    assert isinstance(row, Row) and (list(row.input_ids), list(row.loss_mask)) == ([5, 6, 7], [0, 1, 1])
    (row,) = rows_of({"input_ids": np.array([5, 6]), "loss_mask": np.array([True, False])})
    assert isinstance(row, Row)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ({}, "input_ids, messages"), ({"prompt": 1}, "'prompt'"), (7, "int"), ({"text": 7}, "text is a int"), ({"input_ids": [1]}, "no loss_mask"),
        ({"input_ids": [1, 2], "loss_mask": [1, 1], "attention_mask": [0, 1]}, "1 after a 0"), ({"input_ids": [1, 2], "loss_mask": [0, 1], "attention_mask": [1, 0]}, "attention_mask is 0"),
        ({"input_ids": [1, 2], "loss_mask": [0, 1], "attention_mask": [1]}, "1 entries"), ({"messages": []}, "empty"), ({"messages": "x"}, "str"), ({"messages": HI, "conversations": HI}, "both"),
        ({"messages": [{"content": "x"}]}, r"messages\[0\] has neither"), ({"messages": [{"role": "", "content": "x"}]}, r"messages\[0\].role"),
        ({"messages": [{"role": "user", "content": 1}]}, r"messages\[0\].content is a int"), ({"conversations": [{"from": "cat", "value": "x"}]}, "'cat'"),
    ],
)
def test_what_is_no_prompt_is_named(prompt: Any, says: str) -> None:
    assert count_rows(prompt, "each") == 1
    with pytest.raises(sluice.InvalidError, match=says):
        list(rows_of(prompt, Tokenizer()))


def test_conversations_want_a_tokenizer_with_a_template_of_its_own() -> None:
    class Bare(Tokenizer):
        chat_template = None

    for tokenizer, says in ((None, "no tokenizer"), (Bare(), "chat template"), (lambda text: {}, "can't render")):
        with pytest.raises(sluice.UnsupportedError, match=says):
            list(rows_of({"messages": HI}, tokenizer))
    with pytest.raises(sluice.UnsupportedError, match="tools"):
        list(rows_of({"messages": HI, "tools": [{"name": "f"}]}, Tokenizer()))


def test_a_template_that_can_not_be_rendered_here_is_no_refused_row() -> None:
    class Lacks(Tokenizer):
        def apply_chat_template(self, *_: Any, **__: Any) -> str:
            raise ImportError("apply_chat_template requires jinja2")

    with pytest.raises(sluice.UnsupportedError, match="jinja2"):
        list(rows_of({"messages": HI}, Lacks()))


def test_a_file_is_walked_line_by_line_and_bad_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n{"text": "b", "text": "c"}\n[1]\n\xff\n{"text": "d"}')
    for _ in range(2):
        lines = list(source := JsonLines(path))
        assert [line["text"] for line in lines if isinstance(line, Line)] == ["a", "d"]
        bad = [line for line in lines if isinstance(line, Refusal)]
        assert [b.reason for b in bad] == ["bad"] * 3 and [b.detail.split(":")[0] for b in bad] == ["p.jsonl line 3", "p.jsonl line 4", "p.jsonl line 5"]
        assert "'text' is given twice" in bad[0].detail
    name = source.name
    assert JsonLines(path).name == name
    path.write_bytes(b"{}")
    assert JsonLines(path).name != name
    with pytest.raises(KeyError, match="none.jsonl"):
        JsonLines(tmp_path / "none.jsonl")
