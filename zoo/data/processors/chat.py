"""A row as a chat template takes it: contents in parts, tool calls and tools."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence, Set
from inspect import signature
from typing import TYPE_CHECKING

from zoo.data.errors import RowError
from zoo.data.sources.formats.tags import PLACEHOLDER, plain
from zoo.data.sources.rows import Row
from zoo.errors import ConfigError
from zoo.types import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

THOUGHT_BEGINS, THOUGHT_ENDS = "<think>", "</think>"
MOST_SEARCHED = 2**26  # characters in which a row's pieces are looked for again, where a template reorders them
NOT_SET = ("tools", "documents", "add_generation_prompt")  # names that chat templates read of a row or of a call


class SpecialTokens:
    """The special tokens of a tokenizer (`ids`: token -> its id); texts of rows may hold those that a recipe allows."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = tokenizer.added_tokens_decoder.items()
        self.ids: dict[str, int] = {token.content: number for number, token in added if token.special}
        self._allowed: frozenset[str] = frozenset()
        special_ids = (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id)
        self._control = frozenset(number for number in special_ids if number is not None)
        self._pattern = re.compile("|".join(map(re.escape, sorted(self.ids, key=len, reverse=True))))

    def allow(self, tokens: Sequence[str], control: Set[int]) -> None:
        """Let texts hold these tokens of data.special_tokens, such as `<|box_start|>`.

        Raises:
            ConfigError: no special token of the tokenizer, or one of turns and media (`control`), which only the template may write.
        """
        for token in tokens:
            why = ""
            if token not in self.ids:
                why = "is no special token of the tokenizer, so texts may hold it anyway"
            elif self.ids[token] in control | self._control:
                why = "opens or ends a turn, or stands for media, which only the chat template may write"
            if why:
                raise ConfigError(f"data.special_tokens: {token!r} {why}; leave it out.")
        self._allowed = frozenset(tokens)

    def check(self, row: Row, media: Set[int]) -> None:
        """That the row's texts hold none but those allowed; a tag such as `<image>` may be one that the family doesn't use.

        Raises:
            RowError: they hold one ("special_token_in_text").
        """
        texts = [
            (f"messages[{n}]", plain(PLACEHOLDER.sub(" ", content))) for n, (_, content) in enumerate(row.messages)
        ]
        texts += [(f"messages[{n}].name", name) for n, name in enumerate(row.names)]
        texts += [(f"messages[{n}].tool_calls", called) for n, called in enumerate(row.calls)]
        texts += [("tools", row.tools)]
        for where, content in texts if row.text is None else [("text", row.text)]:
            for match in self._pattern.finditer(content) if self.ids else ():
                token = match[0]
                is_tag = PLACEHOLDER.fullmatch(token) and self.ids[token] not in media
                if token not in self._allowed and not is_tag:
                    advice = "take it out, or, where it is no turn's or medium's, name it in data.special_tokens."
                    text = f"{where} contains {token!r}, a special token of the tokenizer; {advice}"
                    raise RowError(row.source, "special_token_in_text", text)

    def without(self, tokens: Sequence[int]) -> list[int]:
        """The tokens without special ones but those allowed."""
        left_out = {number for token, number in self.ids.items() if token not in self._allowed}
        return [token for token in tokens if token not in left_out]


def with_thoughts(messages: Sequence[JsonObject]) -> list[JsonObject]:
    """Chat messages in which the thinking block of an answer stands under `reasoning_content`, as some templates want it."""
    rewritten = []
    for message in messages:
        content = message["content"]
        if message["role"] == "assistant" and isinstance(content, str) and THOUGHT_ENDS in content:
            thought, _, rest = content.partition(THOUGHT_ENDS)
            thought = thought.lstrip().removeprefix(THOUGHT_BEGINS).strip()
            message = {**message, "content": rest.lstrip(), "reasoning_content": thought}
        rewritten.append(message)
    return rewritten


def wants_thoughts(render: Callable[[list[JsonObject]], str]) -> bool:
    """Whether a chat template takes thinking as `reasoning_content` alone: it leaves a block within the text as it is, behind one of its own."""
    thought = "<think>\nwhy\n</think>\n\nso"
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": thought}]
    try:
        return render(messages).count("</think>") > 1 == render(with_thoughts(messages)).count("</think>")
    except Exception:  # it renders no such chat: whatever is wrong shows with the rows
        return False


def chat_messages(row: Row) -> list[JsonObject]:
    """The row as chat messages: contents with placeholders become lists of text and media parts."""
    calls = row.calls or ("",) * len(row.messages)
    names = (*row.names, *("",) * (len(row.messages) - len(row.names)))
    messages: list[JsonObject] = []
    for (role, content), called, name in zip(row.messages, calls, names, strict=True):
        pieces = [plain(piece) for piece in PLACEHOLDER.split(content)]  # text, mark, text, mark, ..., text
        parts = [
            {"type": piece} if number % 2 else {"type": "text", "text": piece}
            for number, piece in enumerate(pieces)
            if piece
        ]
        message: JsonObject = {"role": role, "content": pieces[0] if len(pieces) == 1 else parts}
        if name:
            message["name"] = name
        if called:
            message["tool_calls"] = [{"type": "function", "function": call} for call in json.loads(called)]
        messages.append(message)
    return messages


def check_written(row: Row, text: str) -> None:
    """That a chat template has written what system and user say, tools, calls and their results: many templates leave some out.

    Raises:
        RowError: it has not ("labels").
    """

    def said_by(role: str) -> list[str]:
        contents = [content for speaker, content in row.messages if speaker == role]
        return [plain(piece) for content in contents for piece in PLACEHOLDER.split(content)[::2]]

    for role in ("system", "user"):
        missing = _not_written(said_by(role), text, f"what the {role} says", row.source)
        if missing is not None:
            advice = "leave it out of the row, too, or use a template that writes it."
            error = f"the chat template leaves out what the {role} says: {missing.strip()[:40]!r}; {advice}"
            raise RowError(row.source, "labels", error)
    tools = [tool["function"]["name"] for tool in json.loads(row.tools)] if row.tools else []
    called = [call["name"] for calls in row.calls if calls for call in json.loads(calls)]
    for kind, names in (("tools", tools), ("tool calls", called), ("tool results", said_by("tool"))):
        missing = _not_written(names, text, kind, row.source)
        if missing is not None:
            advice = "use one that does, or leave the row out."
            message = f"the chat template writes no {kind}: {missing[:40]!r} is not in its text; {advice}"
            raise RowError(row.source, "labels", message)


def _not_written(pieces: Iterable[str], text: str, kind: str, source: str) -> str | None:
    """The first of the pieces that is not in a template's text; None where all are.

    Templates keep the order of a row, so a piece is looked for behind the one before it first: that takes the time of reading
    the text once. RowError ("labels") where so many are written in another order that finding them would take long.
    """
    behind, spent = 0, 0
    for piece in map(str.strip, pieces):
        start = text.find(piece, behind)
        if start < 0:
            spent += len(text)
            if spent > MOST_SEARCHED:
                message = f"the chat template writes {kind} in another order than the row, and the row is too long for that; cut it."
                raise RowError(source, "labels", message)
            start = text.find(piece, 0, behind + len(piece))
            if start < 0:
                return piece
        behind = start + len(piece)
    return None


def check_template_arguments(hf: ProcessorMixin, arguments: Iterable[str]) -> None:
    """Refuse names in data.template that the chat template of `hf`, a Hugging Face processor, can't be given.

    Raises:
        ConfigError: the template doesn't read it, or it is not for a recipe to set.
    """
    reserved = {*signature(hf.apply_chat_template).parameters, "messages", *NOT_SET}
    for name in arguments:
        if name in reserved or not re.search(rf"\b{re.escape(name)}\b", str(hf.chat_template)):
            hint = "see the names in the folder's chat_template.jinja, or leave it out."
            raise ConfigError(f"data.template.{name}: the chat template reads no such argument; {hint}")
