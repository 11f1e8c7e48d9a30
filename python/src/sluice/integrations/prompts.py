"""Prompts to token rows, with the target's own tokenizer and chat template.

A prompt is one of these, as a mapping or as a line of a JSONL file:

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}      also "conversations", and "from" and "value" as ShareGPT has them
    {"text": "All of it is supervised."}                                                               or a plain str
    {"input_ids": [1, 15, 7, 9], "loss_mask": [0, 0, 1, 1]}                                            final token ids

Other fields are ignored, save two: where ids come with an "attention_mask", the padding at their right end is cut off, and "tools" go to the chat template. Ids come before messages and messages
before text, since data sets that were tokenised often still carry their text.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InvalidError, NotFoundError, SluiceError, UnsupportedError
from ..queue import Position

Ints = npt.NDArray[np.int64]

TURNS = ("each", "whole")
_ROLE_OF = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclass(frozen=True)
class Row:
    """One row of token ids that are final. ``loss_mask`` is 1 on the tokens that supervise the draft, and as long as ``input_ids``."""

    input_ids: Sequence[int] | Ints
    loss_mask: Sequence[int] | Ints
    position: Position | None = None
    where: str = field(default="", compare=False)  # for messages


@dataclass(frozen=True)
class Refusal:
    """A row that was not made a sample of, and why.

    ``reason`` is "bad" (it breaks its documented form), "template" (the chat template does not take it), "boundary" (the rendered prompt is no prefix of the rendered answer), "short" or
    "unsupervised" (the schema's admission rule), or "not_finite" (what the target computed is not finite).
    """

    reason: str
    detail: str
    position: Position | None = None


class Line(dict[str, Any]):
    """An object of a JSONL file, which knows where it stands."""

    where = ""


Prompt = Row | Mapping[str, Any] | str | Refusal


class JsonLines:
    """The prompts of JSONL files, in the order in which they stand: an iterable that may be walked through again, and never holds more than a line.

    ``name`` names the stream by all that fixes the order of its lines: the files' base names and sizes. Blank lines are passed over; a line that is no JSON object comes as a
    :class:`Refusal` with the reason "bad". Raises NotFoundError.
    """

    def __init__(self, *paths: str | os.PathLike[str]) -> None:
        if not paths:
            raise InvalidError("are none, want at least one file", op="prompts", subject="paths")
        self.paths = [os.fspath(p) for p in paths]
        digest = hashlib.sha256()
        for path in self.paths:
            if not os.path.isfile(path):
                raise NotFoundError("is no file", op="prompts", subject=path)
            digest.update(f"{os.path.basename(path)}\0{os.path.getsize(path)}\0".encode(errors="surrogateescape"))
        self.name = "jsonl:" + digest.hexdigest()[:32]

    def __iter__(self) -> Iterator[Line | Refusal]:
        for path in self.paths:
            with open(path, "rb") as file:
                for number, data in enumerate(file, 1):
                    if data.strip():
                        yield _line(data, f"{os.path.basename(path)} line {number}")


def _line(data: bytes, where: str) -> Line | Refusal:
    try:
        value = json.loads(data.decode(), object_pairs_hook=_once)
    except (ValueError, RecursionError) as e:
        return Refusal("bad", f"{where}: is not valid JSON: {e}"[:500])
    if not isinstance(value, dict):
        return Refusal("bad", f"{where}: is {_kind(value)}, want an object")
    line = Line(value)
    line.where = where
    return line


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r:.40} is given twice")
    return value


def count_rows(prompt: Prompt, turns: str) -> int:
    """How many rows (and refusals) :func:`rows_of` makes of a prompt. Nothing is tokenised for it."""
    if turns == "whole" or not isinstance(prompt, Mapping) or "input_ids" in prompt:
        return 1
    try:
        messages = _messages(prompt)
    except InvalidError:
        return 1
    return max(1, [m["role"] for m in messages or ()].count("assistant"))


def rows_of(prompt: Prompt, tokenizer: Any = None, *, turns: str = "each") -> Iterator[Row | Refusal]:
    """Make the rows of a prompt, or the reason why there is none.

    A conversation becomes a row for each assistant turn (``turns="each"``): the chat template renders all that stands before the turn, with the generation prompt, and then the same with the
    answer. The loss mask is 1 on what the second has more than the first; where the first's tokens are no prefix of the second's, the row is refused ("boundary"). With ``turns="whole"`` all
    assistant turns are supervised in one row, each found in the same way; templates that write earlier turns in another form than the last one are refused there.

    Text becomes one row with all tokens supervised, and the tokenizer's own special tokens.

    Raises InvalidError, which names the field, for what is no prompt, and UnsupportedError where there is no tokenizer or it has no chat template.
    """
    if isinstance(prompt, (Row, Refusal)):
        yield prompt
        return
    if isinstance(prompt, str):
        prompt = {"text": prompt}
    if not isinstance(prompt, Mapping):
        raise InvalidError(f"is {_kind(prompt)}, want a Row, a mapping or a str", op="prompts", subject="prompt")
    where = getattr(prompt, "where", "")
    if "input_ids" in prompt:
        yield _given_ids(prompt, where)
        return
    messages = _messages(prompt)
    if messages is not None:
        yield from _conversation(_template(tokenizer, prompt), messages, turns, where)
        return
    text = prompt.get("text")
    if not isinstance(text, str):
        what = f"text is {_kind(text)}, want a string" if "text" in prompt else f"has the fields {sorted(map(str, prompt))[:8]}, want input_ids, messages, conversations or text"
        raise _bad(where, what)
    if tokenizer is None:
        raise UnsupportedError("there is no tokenizer", op="prompts", subject=where, hint="give one, or token ids")
    ids = list(tokenizer(text)["input_ids"])
    yield Row(ids, [1] * len(ids), where=where)


def _bad(where: str, detail: str) -> InvalidError:
    return InvalidError(detail, op="prompts", subject=where or "prompt")


def _kind(value: object) -> str:
    return "null" if value is None else f"a {type(value).__name__}"


# -- token ids -------------------------------------------------------------------------------------------------------------


def _given_ids(prompt: Mapping[str, Any], where: str) -> Row:
    ids = prompt["input_ids"]
    if "loss_mask" not in prompt:
        raise _bad(where, "has input_ids but no loss_mask, want 1 on each token that the draft shall learn and 0 elsewhere")
    mask = prompt["loss_mask"]
    if "attention_mask" in prompt:
        attention = bits(prompt["attention_mask"], "attention_mask", where)
        n = int(attention.sum())
        if attention[:n].sum() != n:
            raise _bad(where, "attention_mask has a 1 after a 0, want padding at the right only")
        for name, value in (("input_ids", ids), ("loss_mask", mask)):
            if len(value) != len(attention):
                raise _bad(where, f"attention_mask has {len(attention)} entries, {name} has {len(value)}")
        if np.asarray(mask)[n:].any():
            raise _bad(where, "loss_mask is 1 where attention_mask is 0")
        ids, mask = ids[:n], mask[:n]
    return Row(ids, mask, where=where)


def integers(values: Any, field_name: str, where: str, kinds: str = "iu") -> Ints:
    """A flat array of integers. Raises InvalidError for whatever else it is: nothing is rounded."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError) as e:
        raise _bad(where, f"{field_name} is no list of integers: {e}") from None
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in kinds:
        raise _bad(where, f"{field_name} is {array.dtype} {list(array.shape)}, want a flat list of integers")
    return array.astype(np.int64)


def bits(values: Any, field_name: str, where: str) -> Ints:
    """A flat array of 0 and 1."""
    array = integers(values, field_name, where, "iub")
    if array.size and not ((array == 0) | (array == 1)).all():
        raise _bad(where, f"{field_name} has {int(array[(array != 0) & (array != 1)][0])}, want 0 or 1")
    return array


# -- conversations ---------------------------------------------------------------------------------------------------------


def _messages(prompt: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    where = getattr(prompt, "where", "")
    names = [name for name in ("messages", "conversations") if name in prompt]
    if not names:
        return None
    if len(names) > 1:
        raise _bad(where, "has both messages and conversations, want one of them")
    turns = prompt[names[0]]
    if not isinstance(turns, (list, tuple)) or not turns:
        raise _bad(where, f"{names[0]} is {_kind(turns) if turns or not isinstance(turns, (list, tuple)) else 'empty'}, want a list of turns")
    return [_message(turn, f"{names[0]}[{i}]", where) for i, turn in enumerate(turns)]


def _message(turn: Any, at: str, where: str) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise _bad(where, f"{at} is {_kind(turn)}, want an object with role and content")
    if "role" in turn:
        if not isinstance(turn["role"], str) or not turn["role"]:
            raise _bad(where, f"{at}.role is {turn['role']!r:.40}, want system, user, assistant or another role of the chat template")
        if not isinstance(turn.get("content"), str) and not (turn.get("content") is None and turn.get("tool_calls")):
            raise _bad(where, f"{at}.content is {_kind(turn.get('content'))}, want a string")
        return dict(turn)
    if "from" in turn:
        if turn["from"] not in _ROLE_OF:
            raise _bad(where, f"{at}.from is {turn['from']!r:.40}, want human, gpt or system")
        if not isinstance(turn.get("value"), str):
            raise _bad(where, f"{at}.value is {_kind(turn.get('value'))}, want a string")
        return {"role": _ROLE_OF[turn["from"]], "content": turn["value"]}
    raise _bad(where, f"{at} has neither role and content nor from and value")


@dataclass(frozen=True)
class _Template:
    tokenizer: Any
    options: Mapping[str, Any]

    def __call__(self, messages: list[dict[str, Any]], generation: bool) -> list[int]:
        """The template renders text; its special tokens stand in it, so the tokenizer adds none."""
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation, **self.options)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def _template(tokenizer: Any, prompt: Mapping[str, Any]) -> _Template:
    where = getattr(prompt, "where", "")
    if tokenizer is None:
        raise UnsupportedError("there is no tokenizer", op="prompts", subject=where, hint="give one, or token ids")
    render = getattr(tokenizer, "apply_chat_template", None)
    if render is None:
        raise UnsupportedError("the tokenizer can't render conversations", op="prompts", subject=type(tokenizer).__name__, hint="install transformers 4.34 or newer, or give token ids")
    if not getattr(tokenizer, "chat_template", None):
        raise UnsupportedError("the tokenizer has no chat template of its own", op="prompts", subject=type(tokenizer).__name__, hint="set its chat_template, or give token ids")
    if not prompt.get("tools"):
        return _Template(tokenizer, {})
    if "tools" not in inspect.signature(render).parameters:
        raise UnsupportedError("this version of transformers renders no tools", op="prompts", subject=where, hint="install a newer one")
    return _Template(tokenizer, {"tools": prompt["tools"]})


def _conversation(template: _Template, messages: list[dict[str, Any]], turns: str, where: str) -> Iterator[Row | Refusal]:
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    at = f"{where}: " if where else ""
    if not answers:
        yield Refusal("unsupervised", f"{at}has no assistant turn")
        return
    if turns == "each":
        for i in answers:
            yield _one_row(template, messages[:i + 1], [i], at, where)
    else:
        yield _one_row(template, messages[:answers[-1] + 1], answers, at, where)


def _one_row(template: _Template, messages: list[dict[str, Any]], answers: list[int], at: str, where: str) -> Row | Refusal:
    """The row of messages, whose last one is an answer, with the given ones supervised."""
    try:
        ids = template(messages, False)
        mask = [0] * len(ids)
        for i in answers:
            before = template(messages[:i], True)
            upto = ids if i == len(messages) - 1 else template(messages[:i + 1], False)
            if ids[:len(upto)] != upto:
                return Refusal("boundary", f"{at}turn {i}: what is rendered up to it is no prefix of the whole conversation")
            if upto[:len(before)] != before:
                return Refusal("boundary", f"{at}turn {i}: the rendered prompt is no prefix of the same with the answer")
            mask[len(before):len(upto)] = [1] * (len(upto) - len(before))
    except SluiceError:
        raise
    except ImportError as e:  # transformers renders with jinja2, which it does not bring
        raise UnsupportedError(f"the chat template can't be rendered: {e}", op="prompts", subject=where) from e
    except Exception as e:  # templates are programs, and say by exceptions of any kind what they do not take
        return Refusal("template", f"{at}the chat template does not take it: {type(e).__name__}: {e}"[:500])
    return Row(ids, mask, where=where)
