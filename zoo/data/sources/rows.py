"""Rows of a data set, read and checked without decoding any media.

A row is `{"messages": [{"role", "content"}], "images": [], "videos": [], "audios": []}` with the placeholders
`<image>`, `<video>` and `<audio>` in the contents, as many of each as there are media. `image`, `video` and `audio`
(one medium) are accepted too, and so are `kind` (a label for statistics), `weight` (of the row, and of a message, in the
loss), `use_audio_in_video`, and `speech` with its `speaker` (`zoo.data.sources.formats.speech`). `{"text": ...}` is plain text.
Other forms are turned into this one by `zoo.data.sources.formats`. Paths are relative to the JSONL's folder. A row takes about 1 kB of
memory, and 50 microseconds to read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from zoo.config.entries import MediaLimits
from zoo.data.errors import RowError, bad_row
from zoo.data.sources.formats.choose import PREFERENCE, RETRIEVAL, Form, to_own
from zoo.data.sources.formats.grounding import Box
from zoo.data.sources.formats.messages import MAX_WEIGHT, TORN, Message, is_torn, read_turns, read_weight, typed
from zoo.data.sources.formats.speech import read_speech
from zoo.data.sources.formats.tags import PLACEHOLDER, literal_tags
from zoo.data.sources.formats.turns import own_tools
from zoo.data.sources.lines import json_object, locate, numbered_items
from zoo.data.sources.references import (
    Access,
    Medium,
    OpenedMedium,
    check_file,
    check_medium,
    files_of,
    missing_text,
    open_medium,
    shown,
)
from zoo.errors import UserError
from zoo.types import JsonMapping, JsonObject

__all__ = ["PLACEHOLDER", "Box", "Message", "Row", "RowError", "make_row", "missing_text", "parse_row", "read_rows"]

MEDIA = {"image": "images", "video": "videos", "audio": "audios"}  # placeholder and singular key -> plural key
TEXT_MB = 4  # MiB of a row's texts together, in UTF-8; tokens of them take up to 250 times as much
MAX_MEDIA = 4096  # of a row
MAX_ANSWERS = 4096  # of a row, of which any is right
MAX_KIND = 100  # characters of a label
OF_EVERY_REWARD = ("answer", "references", "row")  # arguments that users' rewards have whatever the row


@dataclass(frozen=True)
class Row:
    """One conversation with its media, or a plain text."""

    messages: tuple[Message, ...]  # in order
    # One for each <image>: a path as written, or another `Medium` of `zoo.data.sources.references`.
    images: tuple[Medium, ...] = ()
    videos: tuple[Medium, ...] = ()  # one for each <video>
    audios: tuple[Medium, ...] = ()  # one for each <audio>
    kind: str | None = None  # a label for statistics
    use_audio_in_video: bool = False  # the videos' sound tracks are heard as well
    source: str = ""  # where the row stands: "train.jsonl:17"
    root: Path = Path()  # folder that paths are relative to
    outside: bool = True  # whether paths may lead out of it
    weight: float = 1.0  # of the row in the loss
    weights: tuple[float, ...] = ()  # of each message in the loss; () where all are 1
    text: str | None = None  # plain text, where there are no messages
    trusted: bool = False  # whether the media are zoo's own, which need no worker to decode them
    tools: str = ""  # the tools that the conversation offers, a list in JSON; "" for none
    # Tool calls by message, each a list in JSON ("" for none); () where no message has any.
    calls: tuple[str, ...] = ()
    names: tuple[str, ...] = ()  # of who speaks each message, "" for none; () where no message has any
    boxes: tuple[Box, ...] = ()  # one for each <bbox> in the messages
    form: str = "messages"  # the format that it was read as
    task: str | None = None  # what the answer is, which says how it is scored
    answers: tuple[str, ...] = ()  # all texts that are accepted as its last answer; () for that one alone
    label: bool | None = None  # whether its last answer is desirable, where the row says so
    speech: Medium | None = None  # what its last answer is spoken as: an npy file of codes
    speaker: str = ""  # who speaks it, "" where the row does not say
    extra: str = ""  # what users' rewards get beside, by name: an object in JSON, "" for none
    limits: MediaLimits | None = None  # of its media, where its entry has its own
    skipped: tuple[str, ...] = field(default=(), compare=False)  # its columns that say nothing of the sample
    # In a preference pair: the same row with the rejected answer, or what is wrong with that.
    rejected: Row | RowError | None = None
    candidates: tuple[Row, ...] = ()  # in a row of retrieval, whose query this is: the positive, then hard negatives
    instruction: str = ""  # what the query is for; "": what the recipe says
    prompt: bool = False  # it ends with a question, behind which the opening of an answer is written

    def path(self, name: str) -> Path:
        """A media file's path."""
        return self.root / name

    def opened(self, medium: Medium) -> OpenedMedium:
        """One of its media at hand; see `zoo.data.sources.references.open_medium`."""
        return open_medium(medium, self.root, self.outside)

    @property
    def files(self) -> tuple[Medium, ...]:
        """All its media, those of its candidates, and the codes of its speech."""
        own = (*self.images, *self.videos, *self.audios, *(() if self.speech is None else (self.speech,)))
        return own + tuple(file for candidate in self.candidates for file in candidate.files)

    def check_files(self) -> None:
        """Check that its files of media, and those of its rejected answer, are there; RowError where one is not."""
        for row in (self, *([self.rejected] if isinstance(self.rejected, Row) else [])):
            try:
                for medium in row.files:
                    for file in files_of(medium):
                        check_file(file, row.root, row.outside)
            except RowError as error:
                raise error.at(self.source) from error

    @property
    def media(self) -> set[str]:
        """Kinds of media in the row: image, video, audio (a video's sound that is heard included)."""
        heard = bool(self.audios) or self.use_audio_in_video
        present = {"image": bool(self.images), "video": bool(self.videos), "audio": heard}
        own = {kind for kind, is_present in present.items() if is_present}
        return own.union(*(candidate.media for candidate in self.candidates))

    @property
    def answer_weights(self) -> list[float]:
        """The weight of each assistant's answer: the row's times the message's."""
        weights = self.weights or (1.0,) * len(self.messages)
        pairs = zip(self.messages, weights, strict=True)
        return [self.weight * weight for (role, _), weight in pairs if role == "assistant"]


def read_rows(
    spec: str | Path,
    on_bad: Callable[[RowError], None] | None = None,
    *,
    form: Form | str | None = None,
    access: Access | None = None,
    keep: Callable[[int], bool] | None = None,
) -> list[Row]:
    """All rows of a file of lines (JSONL, a JSON list, CSV, plain text), or of a bundled set.

    Args:
        spec: path of the file, or a bundled set with its split ("digits:train").
        on_bad: called with the error of each bad row, which is then left out; None raises the first.
        form: the rows' format, or its name; None: found by each row's keys.
        access: which media rows may name; None: any path, relative to the file's folder.
        keep: whether the row of a line number is wanted; None: all are.

    Raises:
        RowError: a bad row (see `make_row`), when `on_bad` is None.
        UserError: no such file or bundled set, or a file without rows.
    """
    path = locate(str(spec))
    access = access or Access(path.parent)
    rows, number = [], 0
    for number, line in numbered_items(path, str(spec)):
        if keep is not None and not keep(number):
            continue
        try:
            rows.append(parse_row(line, f"{spec}:{number}", access, form))
        except RowError as error:
            if on_bad is None:
                raise
            on_bad(error)
    if not number:
        raise UserError(no_rows(spec))
    return rows


def no_rows(spec: str | Path) -> str:
    """The message for a file without rows."""
    if Path(spec).suffix in (".csv", ".tsv"):
        return f"{spec} has no rows; a first line that names columns and a line for each row are wanted."
    return f"{spec} has no rows; each line should be a JSON object with 'messages'."


def parse_row(content: object, source: str, access: Access, form: Form | str | None = None) -> Row:
    """The row of a line of JSON, or of an item of `numbered_items`; see `make_row`. Broken JSON is a RowError ("bad_json")."""
    try:
        item = json_object(content)
    except RowError as error:
        raise error.at(source) from error
    return make_row(item, source, access, form)


def make_row(item: JsonMapping, source: str, access: Access, form: Form | str | None = None) -> Row:
    """A row as a file, a data set or a program has it, checked.

    Args:
        item: the row, of any format.
        source: where the row stands, for errors.
        access: which media it may name.
        form: its format, or the name of that; None: found by its keys.

    Raises:
        RowError: a key or value of the wrong name, type or content ("bad_row"), several formats at once ("format"), not as
            many media as placeholders ("placeholder_mismatch"), a file out of the data root ("outside_root") or at a URL ("url").
    """
    try:
        return _made(item, source, access, form if isinstance(form, Form) else Form(form))
    except RowError as error:
        raise error.at(source) from error
    except RecursionError as error:
        raise RowError(source, "bad_row", "the row is nested too deeply.") from error


def _made(item: JsonMapping, source: str, access: Access, form: Form) -> Row:
    item, form_name, boxes, skipped = to_own(item, form)
    if form_name == RETRIEVAL:
        return replace(_retrieval(item, source, access, form), skipped=skipped)
    rejected = item.pop("rejected", None) if form_name == PREFERENCE else None
    if "text" in item and "messages" not in item:
        return _text_row(item, source, access, skipped)
    turns = read_turns(item)
    messages, weights = tuple(turn.message for turn in turns), tuple(turn.weight for turn in turns)
    calls = tuple(_plain_json(turn.calls, f"{turn.where}.tool_calls") if turn.calls else "" for turn in turns)
    names = tuple(turn.name for turn in turns)
    tools = _plain_json(own_tools(item.get("tools")), "tools")
    task, answers = typed(item, "task", str, None), _answers(item)
    if task is not None and is_torn(task):
        raise bad_row(TORN.format("task"))
    contents = [content for _, content in messages]
    _check_texts((*contents, *calls, *names, tools, task or "", *answers))
    listed = {kind: _listed(item, kind) for kind in MEDIA}
    counts = {kind: len(media) for kind, (_, media) in listed.items()}
    if sum(counts.values()) > MAX_MEDIA:
        raise bad_row(f"{sum(counts.values())} media are over the limit of {MAX_MEDIA} a row.")
    if form.literal_tags:
        contents = literal_tags([(role, content) for role, content in messages], counts)
        messages = tuple(map(Message, (role for role, _ in messages), contents))
    _check_placeholders(messages, counts)
    media = {
        kind: tuple(check_medium(value, kind, f"{key}[{n}]", access) for n, value in enumerate(values))
        for kind, (key, values) in listed.items()
    }
    use_sound = typed(item, "use_audio_in_video", bool, False)
    if use_sound and not media["video"]:
        raise bad_row("use_audio_in_video is true, but the row has no video.")
    speech, speaker = read_speech(item, access)
    label = item.get("label")
    if label is not None and not isinstance(label, bool):
        text = f"label is {shown(repr(label))}; a bool is wanted, or columns: {{label: null}} where it says something else."
        raise bad_row(text)
    wrong = next((box for box in boxes if box.image >= counts["image"] and not box.norm), None)
    if wrong is not None:
        text = f"objects.image_id is {wrong.image}, but the row has {counts['image']} images; they are counted from 0."
        raise bad_row(text)
    if isinstance(rejected, RowError):  # it matters where pairs are trained alone
        rejected = rejected.at(source)
    elif rejected is not None:
        try:
            rejected = _made(rejected, source, access, Form("messages", literal_tags=form.literal_tags))
        except RowError as error:
            rejected = error.at(source)
    row = Row(
        messages=messages,
        images=media["image"],
        videos=media["video"],
        audios=media["audio"],
        kind=_kind(item, None),
        use_audio_in_video=use_sound,
        source=source,
        root=access.root,
        outside=access.outside,
        weight=read_weight(item, "the row"),
        weights=weights if set(weights) != {1.0} else (),
        trusted=access.trusted,
        tools=tools,
        calls=calls if any(calls) else (),
        names=names if any(names) else (),
        boxes=tuple(boxes),
        form=form_name,
        task=task,
        answers=answers,
        label=label,
        speech=speech,
        speaker=speaker,
        extra=_extra(item),
        skipped=skipped,
        rejected=rejected,
    )
    if max(row.answer_weights) > MAX_WEIGHT:
        raise bad_row(f"weights of row and message multiply to more than {MAX_WEIGHT:g}.")
    return row


def _retrieval(item: JsonObject, source: str, access: Access, form: Form) -> Row:
    """The row of what `from_retrieval` gave, whose parts end with an answer, as all rows of messages do; here it is cut off."""
    rows = []
    for name, part in item["parts"]:
        try:
            row = _made(part, source, access, Form("messages", literal_tags=form.literal_tags))
        except RowError as error:
            raise RowError(source, error.cause, f"in {name}: {error.args[-1]}") from error
        rows.append(replace(row, messages=row.messages[:-1], calls=row.calls[:-1], names=row.names[:-1], prompt=True))
    kind = _kind(item, None)
    return replace(rows[0], candidates=tuple(rows[1:]), instruction=item["instruction"], kind=kind, form=RETRIEVAL)


def _text_row(item: JsonObject, source: str, access: Access, skipped: tuple[str, ...]) -> Row:
    text = item["text"]
    if not isinstance(text, str):
        raise bad_row(f"text is of type {type(text).__name__}; a string is wanted.")
    if is_torn(text):
        raise bad_row(TORN.format("text"))
    _check_texts([text])
    if not text.strip():
        raise bad_row("text is empty: there is nothing to learn.")
    return Row(
        messages=(),
        kind=_kind(item, "text"),
        source=source,
        root=access.root,
        outside=access.outside,
        weight=read_weight(item, "the row"),
        text=text,
        form="text",
        skipped=skipped,
    )


def _check_texts(texts: Iterable[str]) -> None:
    size = sum(len(text) if text.isascii() else len(text.encode()) for text in texts)
    if size > TEXT_MB * 2**20:
        mebibytes = size / 2**20
        raise bad_row(f"its texts have {mebibytes:.3g} MiB, over the limit of {TEXT_MB}; cut it into several rows.")


def _kind(item: JsonObject, default: str | None) -> str | None:
    """The row's label, under which metrics are logged."""
    kind = typed(item, "kind", str, default)
    if kind is not None and not (kind.isprintable() and 0 < len(kind) <= MAX_KIND):
        raise bad_row(f"kind is {shown(kind)!r}; 1 to {MAX_KIND} printable characters are wanted.")
    return kind


def _answers(item: JsonObject) -> tuple[str, ...]:
    """The texts that are accepted as an answer."""
    answers = typed(item, "answers", list, [])
    if not all(isinstance(answer, str) for answer in answers):
        raise bad_row(f"answers is {shown(answers)}; a list of texts is wanted.")
    if len(answers) > MAX_ANSWERS:
        raise bad_row(f"{len(answers)} answers are over the limit of {MAX_ANSWERS} a row.")
    for number, answer in enumerate(answers):
        if is_torn(answer):
            raise bad_row(TORN.format(f"answers[{number}]"))
    return tuple(answers)


def _extra(item: JsonObject) -> str:
    """What the row holds for users' rewards, each by a name that a function may have for an argument."""
    extra = item.get("extra") or {}
    if not isinstance(extra, Mapping):
        text = f"extra is of type {type(extra).__name__}; an object is wanted, or columns: {{extra: null}} where it says something else."
        raise bad_row(text)
    wrong = [key for key in extra if not str(key).isidentifier() or key in OF_EVERY_REWARD]
    if wrong:
        taken = ", ".join(OF_EVERY_REWARD)
        raise bad_row(f"extra has {shown(repr(wrong[0]))}; names of arguments are wanted, other than {taken}.")
    return _plain_json(dict(extra), "extra")


def _plain_json(values: list[object] | list[JsonObject] | JsonObject, where: str) -> str:
    """A list or object as JSON, "" for an empty one."""
    if not values:
        return ""
    try:
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:  # an image, say, or nan
        raise bad_row(f"{where} can't be written as JSON: {error}.") from error
    if is_torn(text):
        raise bad_row(TORN.format(where))
    return text


def _listed(item: JsonObject, kind: str) -> tuple[str, list[object]]:
    """The key that the row has for a kind of medium, and the media that it lists."""
    plural = MEDIA[kind]
    if item.get(kind) is not None and item.get(plural) is not None:
        raise bad_row(f"both {kind!r} and {plural!r} are given; keep one of them.")
    key = kind if item.get(kind) is not None else plural
    value = item.get(key)
    if isinstance(value, list | tuple):
        return key, list(value)
    if value is not None and key == plural:
        raise bad_row(f"{key} is {shown(value)}; a list of paths is wanted.")
    return key, [] if value is None else [value]


def _check_placeholders(messages: tuple[Message, ...], media: dict[str, int]) -> None:
    marks = [mark for _, content in messages for mark in PLACEHOLDER.findall(content)]
    for kind, wanted in media.items():
        count = marks.count(kind)
        if count != wanted:
            text = f"{count} <{kind}> in the messages but {wanted} in {MEDIA[kind]!r}; make them equal"
            raise bad_row(f"{text}, or set data.literal_tags=true where tags are text.", "placeholder_mismatch")
