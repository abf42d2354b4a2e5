"""Which keys rows of each format have. A key of a row is used, refused by its name, or a column that says nothing of the sample.

A row may have columns of its own (`id`, `source`, `url`) where its format is named or found by columns other than `messages` and
`text`. A key that zoo or another tool gives a meaning, or that is nearly one of the format's, is none of these: `columns: {KEY: null}`
says that nothing is read as it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache

from zoo.data.errors import bad_row
from zoo.data.sources.formats.labelled_media import CAPTIONS, CLASSES, FILE, TRANSCRIPTS, kind_of_file
from zoo.data.sources.formats.media_settings import KEYS as SETTINGS
from zoo.data.sources.references import shown
from zoo.types import JsonMapping

KINDS = ("image", "video", "audio")
MEDIA = tuple(name for kind in KINDS for name in (kind, f"{kind}s"))
# Keys that mean the same in every format with messages.
COMMON = (
    "kind", "task", "answers", "weight", "label", "use_audio_in_video", "tools", "objects", "system",
    "speech", "speaker", "extra",
)  # fmt: skip
REJECTED = ("rejected", "rejected_response", "rejected_messages")
# What the rejected conversation has of its own, in the place of the row's key of that name (ms-swift).
REJECTED_OWN = {f"rejected_{name}": name for name in (*MEDIA, "tools", "objects", "use_audio_in_video")}
QUESTIONS = ("question", "context", "query", "prompt", "instruction")
TURNS = ("messages", "conversations", "conversation")
ANSWERS = ("output", "response", "completion", "answer")
IMAGES = ("image", "images", "img", "picture", "image_path", FILE)
SOUNDS = ("audio", "audios", "sound", "speech", "audio_path", FILE)


@dataclass(frozen=True)
class Keys:
    """The keys of a format.

    Attributes:
        own: those that it reads besides `COMMON`.
        either: names of which a row has one, as only one would be read; those of the same value are one.
        common: of `COMMON`, those that it has.
    """

    own: tuple[str, ...]
    either: tuple[tuple[str, ...], ...] = ()
    common: tuple[str, ...] = COMMON

    @property
    def all(self) -> frozenset[str]:
        """All keys that a row may have."""
        return frozenset((*self.own, *self.common))


ROW_KEYS: dict[str, Keys] = {
    "messages": Keys(("messages", *MEDIA)),
    "conversations": Keys((*TURNS[1:], *MEDIA), (TURNS[1:],)),
    "text": Keys(("text",), common=("kind", "weight")),
    "alpaca": Keys(("instruction", "input", "output", "history", *MEDIA)),
    "query_response": Keys(("query", "response", "history", *MEDIA)),
    "prompt_completion": Keys(("prompt", "completion", *MEDIA)),
    "question_answer": Keys(
        ("question", "context", "answer", "answers", "history", *MEDIA), (("question", "context"),)
    ),
    "preference": Keys(
        ("chosen", *REJECTED, *REJECTED_OWN, *QUESTIONS, *TURNS, *ANSWERS, "input", "history", *MEDIA),
        (
            (*QUESTIONS, *TURNS),
            ("chosen", *ANSWERS),
            (*TURNS, *ANSWERS),
            REJECTED,
            *(("input", name) for name in (*QUESTIONS[:-1], *TURNS)),
            *(("history", name) for name in (*TURNS, "completion")),
        ),
    ),
    "retrieval": Keys(("query", "positive", "negatives", "instruction"), common=("kind",)),
    "cauldron": Keys(("images", "texts")),
    "cord_v2": Keys(("image", "ground_truth")),
    "llava_instruct": Keys((*TURNS[1:], *MEDIA), (TURNS[1:],)),
    "captions": Keys((*IMAGES, *CAPTIONS), (IMAGES[:4], CAPTIONS)),
    "transcripts": Keys((*SOUNDS, *TRANSCRIPTS), (SOUNDS[:4], TRANSCRIPTS)),
    "classes": Keys((*IMAGES, *SOUNDS, *CLASSES), ((*IMAGES[:4], *SOUNDS[:4]), CLASSES)),
}
QUALIFYING = ("input", "history", "context")  # belong to the question, in whatever row they stand
# Keys of one format that a row of another has not: where a row has them, its format has to be named.
CONTENT = frozenset(name for keys in ROW_KEYS.values() for name in keys.own).difference(
    MEDIA, IMAGES, SOUNDS, CLASSES, QUALIFYING, REJECTED[1:], REJECTED_OWN
)
MESSAGE_WEIGHT = "a row's weight in the loss is 'weight'"
REASONING = "reasoning stands in the answer, or under 'reasoning_content' of a message"
CHOICES = "what is to choose from stands in the question"
TOKENS = "rows are texts, which zoo tokenizes"
SYSTEM = "the system's text is 'system'"
TEMPLATE = "arguments of the chat template are data.template"
# Keys that other tools give a meaning -> what zoo has in their place.
FOREIGN: dict[str, str] = {
    **dict.fromkeys(("loss_scale", "loss_weight", "sample_weight", "weights"), MESSAGE_WEIGHT),
    **dict.fromkeys(("loss", "mask"), "a message's part in the loss is its 'weight'"),
    **dict.fromkeys(("margin", "margins"), "pairs have no margin of their own"),
    **dict.fromkeys(("reasoning", "reasoning_content", "thinking", "thought"), REASONING),
    **dict.fromkeys(("choices", "options"), CHOICES),
    **dict.fromkeys(("input_ids", "attention_mask", "labels", "completion_mask"), TOKENS),
    **dict.fromkeys(("system_prompt", "system_message"), SYSTEM),
    **dict.fromkeys(("chat_template", "chat_template_kwargs", "documents"), TEMPLATE),
    **dict.fromkeys(("functions", "tool_calls", "tool_choice"), "functions are 'tools', calls stand in a message"),
    **dict.fromkeys(("positive", "negative", "positive_messages", "negative_messages"), "a pair is 'chosen' and 'rejected'"),
    **dict.fromkeys(("bbox", "bboxes", "boxes"), "boxes stand in 'objects'"),
    **dict.fromkeys(("channel",), "the label of a row for statistics is 'kind'"),
    **dict.fromkeys(("mm_processor_kwargs", *(key for keys in SETTINGS.values() for key in keys)), "settings of a medium stand beside it"),
}  # fmt: skip
_NAMES = {
    **dict.fromkeys(("image", "img", "picture", "photo", "pic"), "image"),
    **dict.fromkeys(("video", "clip", "movie"), "video"),
    **dict.fromkeys(("audio", "sound", "speech", "wav", "recording"), "audio"),
}
MEDIUM = re.compile(
    rf"(?:(?:rejected|chosen)_)?({'|'.join(_NAMES)})e?s?(?:[_-]?(?:path|file|filename|file_name|url|uri|src|bytes|data|base64|b64|list)s?|[_-]?(\d+))?"
)
PLAIN = ("height", "heights")  # of no meaning, though they are near a key that has one


def no_value(value: object) -> bool:
    """Whether a value is as good as none: tables fill columns of other rows up so."""
    return value is None or (isinstance(value, str | list | tuple | dict) and not value)


def check_keys(row: JsonMapping, form: str, *, named: bool, strict: bool) -> tuple[str, ...]:
    """The columns of a row that say nothing of its sample.

    Args:
        row: with its columns under zoo's names.
        form: its format.
        named: whether its entry says how it is read, by a format or by columns: then those of other formats may stand beside it.
        strict: whether each key has to be one of the format.

    Raises:
        RowError: a key that would change nothing, though it has a meaning, or of which another one is read ("bad_row").
    """
    keys = tuple(row)
    key_checks = _key_checks if len(keys) <= 64 else _key_checks.__wrapped__
    refused, skipped, groups = key_checks(keys, form, named, strict)
    for key, medium, text in refused:
        if no_value(row[key]) and not strict:
            continue
        if not medium or _is_missing(row, key, medium):
            raise bad_row(text)
    for group in groups:
        present = [key for key in group if not no_value(row[key])]
        other = next((key for key in present[1:] if not _equal(row[present[0]], row[key])), None)
        if other is not None:
            text = f"the row has both {present[0]!r} and {other!r}, of which {form} reads one; {_left_out(other)}."
            raise bad_row(text)
    return skipped


@lru_cache(4096)
def _key_checks(
    keys: tuple[str, ...], form: str, named: bool, strict: bool
) -> tuple[tuple[tuple[str, str, str], ...], tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """The checks of rows with these keys.

    Returns:
        (key to refuse, medium that it may name, message) of each; columns of no meaning; groups of keys of which one is read.
    """
    known, refused, skipped = ROW_KEYS[form], [], []
    for key in keys:
        if key in known.all:
            continue
        if strict:
            return ((key, "", _unknown(keys, key, form)),), (), ()  # the first is refused, whatever follows
        medium, hint = _meaning(key, form, named)
        if hint:
            text = f"the row has the key {shown(repr(key))}, which zoo does not read of {form}; {hint}, or {_left_out(key)}."
            refused.append((key, medium, text))
        if not hint or medium:
            skipped.append(key)
    groups = [tuple(key for key in group if key in keys) for group in known.either]
    return tuple(refused), tuple(skipped), tuple(group for group in groups if len(group) > 1)


def _meaning(key: str, form: str, named: bool) -> tuple[str, str]:
    """The kind of medium that a key which is none of a format's may name, and what to do; "" for no meaning."""
    known = ROW_KEYS[form]
    if key in FOREIGN:
        return "", FOREIGN[key]
    if key in (*COMMON, *MEDIA, *QUALIFYING, *REJECTED[1:], *REJECTED_OWN):
        return "", "write it as another format that reads it"
    if key in CONTENT:
        return "", "" if named else f"name the format that is to be read: {{path: ..., format: {form}}}"
    match = MEDIUM.fullmatch(key.lower())
    if match is not None:
        kind = _NAMES[match[1]]
        further = match[2] is not None or key.startswith("rejected")  # of another medium than the row's
        return "" if further else kind, f"name its column: {{columns: {{{kind}s: {key}}}}}"
    if key == FILE:
        return FILE, f"name its column: {{columns: {{image: {FILE}}}}}"
    plain = key.lower().replace("-", "_")
    if plain in known.all or plain in COMMON:
        return "", f"write {plain!r}"
    meant = known.all.union(COMMON, MEDIA)
    close = [name for name in meant if abs(len(name) - len(key)) <= 1] if key not in PLAIN else []
    near = get_close_matches(plain, close, n=1, cutoff=0.8)
    return "", f"the nearest is {near[0]!r}" if near else ""


def _is_missing(row: JsonMapping, key: str, medium: str) -> bool:
    """Whether a row names a medium by a key that is not read, and has none of that kind under one that is."""
    if not isinstance(row[key], str | bytes | list | tuple | dict):
        return False
    kind = kind_of_file(row[key]) if medium == FILE else medium
    return kind is not None and all(no_value(row.get(name)) for name in (kind, f"{kind}s"))


def _equal(value: object, other: object) -> bool:
    """Whether two keys have the same value; images and arrays never do."""
    plain = isinstance(value, str | int | float | list | dict) and type(value) is type(other)
    return plain and bool(value == other)


def _left_out(key: str) -> str:
    return f"say that nothing is read as it: {{columns: {{{shown(key)}: null}}}}"


def _unknown(keys: tuple[str, ...], key: str, form: str) -> str:
    """The message for a key of a row of `messages` or `text` whose format is not named."""
    known = [*ROW_KEYS[form].own, *ROW_KEYS[form].common]
    near = get_close_matches(shown(key), known, n=1, cutoff=0.5)
    medium = _meaning(key, form, False)[0] if form != "text" else ""
    if medium in KINDS:
        hint = f"if it names {medium}s, say so in the entry: {{path: ..., columns: {{{medium}s: {shown(key)}}}}}."
    elif near:
        hint = f"did you mean {near[0]!r}?"
    else:
        hint = f"known keys: {', '.join(name for name in known if name not in KINDS)}."
    if key in FOREIGN:
        more = f"In zoo {FOREIGN[key]}."
    elif form not in keys:
        more = f"Name the form of the rows, too, {{path: ..., format: ...}}; there are {', '.join(ROW_KEYS)}."
    elif form == "text" and key in (*MEDIA, FILE):
        more = "A row of 'text' has no media; write it as 'messages', or name a format that keeps them."
    else:
        more = f"Columns that a row may have besides are skipped where the entry names its format: {{path: ..., format: {form}}}."
    return f"unknown key {shown(key)!r}; {hint} {more}"
