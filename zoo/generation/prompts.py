"""Rows as prompts: everything that training puts before a row's last answer, with the media.

A thinking model's empty block before an answer belongs to the prompt, as it carries no loss in training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zoo.config.entries import MediaLimits, is_row
from zoo.config.schema import DataConfig
from zoo.data.errors import RowError
from zoo.data.media.decoding_workers import decoder_for
from zoo.data.processors.processor import Processor
from zoo.data.sample import IGNORE, Sample
from zoo.data.sources.formats.tags import PLACEHOLDER, plain
from zoo.data.sources.objects import listed
from zoo.data.sources.row_set import check_modalities
from zoo.data.sources.rows import Message, Row
from zoo.types import JsonMapping, JsonObject

STAND_IN = "."  # the answer of a row that has none, while its prompt is found


@dataclass(frozen=True)
class Prompt:
    """What an answer is made from."""

    row: Row  # as it was read
    sample: Sample  # tokens and media before the answer; no labels
    reference: str | None  # the row's own answer; None where it has none
    answer: tuple[int, ...]  # its tokens with all that stands behind them; of a stand-in where it has none


def make_prompt(processor: Processor, row: Row, data: DataConfig, *, most: int, answered: bool = True) -> Prompt:
    """The prompt of a row.

    Args:
        processor: the family's.
        row: a checked row. Its last answer is left out; a row that ends with a question has none.
        data: the limits of media are used, and who decodes them.
        most: positions that the model was made for.
        answered: False for a row whose last answer is a stand-in.

    Raises:
        RowError: what `Processor.encode` raises, a plain text ("plain_text"), media in the answer ("media_in_answer") or
            more tokens than the model takes ("overlong").
    """
    whole, reference = answered_row(row, processor.modalities)
    limits = row.limits or MediaLimits.from_data(data)
    video: JsonObject = {"video_fps": limits.video_fps, "max_frames": limits.max_frames}
    sample = processor.encode(whole, **video, pixels=limits.pixels, labels="last", decoder=decoder_for(data))
    length = int((sample.labels != IGNORE).nonzero()[0])
    if length >= most:
        text = f"the prompt has {length} tokens, but the model takes {most} (max_position_embeddings); shorten it."
        raise RowError(row.source, "overlong", text)
    kept = replace(sample, input_ids=sample.input_ids[:length], labels=sample.labels[:length], weights=None)
    own = plain(reference) if answered and reference is not None else None
    return Prompt(row, kept, own, tuple(sample.input_ids[length:].tolist()))


def answered_row(row: Row, modalities: Sequence[str]) -> tuple[Row, str | None]:
    """The row with a stand-in where it has no last answer, and the answer that it has; errors as for `make_prompt`."""
    if row.text is not None:
        raise RowError(row.source, "plain_text", "a plain text has no question to answer; wanted messages.")
    check_modalities(row, modalities)
    asked, reference = row, None
    if row.messages[-1].role == "assistant":
        asked, reference = replace(row, messages=row.messages[:-1]), row.messages[-1].content
        if PLACEHOLDER.search(reference):
            raise RowError(row.source, "media_in_answer", "the last answer has media, which no model here can write.")
    last = Message("assistant", STAND_IN if reference is None else reference)
    calls = (*row.calls, "") if row.calls and reference is None else row.calls
    return replace(asked, messages=(*asked.messages, last), calls=calls, weights=(), weight=1.0), reference


def most_positions(config: Any) -> int:
    """Positions that a family's model was made for."""
    return int(getattr(config.text, "max_position_embeddings", None) or 2**31)


def ends_with_question(row: JsonMapping) -> bool:
    """Whether a row as a dict has no answer of its own."""
    messages = row.get("messages")
    last = messages[-1] if isinstance(messages, list | tuple) and messages else None
    return isinstance(last, Mapping) and last.get("role") == "user"


def with_stand_in(row: JsonMapping) -> JsonObject:
    """The row with an answer, which readers of rows want."""
    if not ends_with_question(row):
        return dict(row)
    return {**row, "messages": [*row["messages"], {"role": "assistant", "content": STAND_IN}]}


def with_stand_ins(rows: Any) -> tuple[Any, list[int]]:
    """Rows to ask about, each as `with_stand_in` has it where they are dicts, and the numbers of those that end with a question."""
    rows = listed(rows)
    if not isinstance(rows, list | tuple) or not all(map(is_row, rows)):
        return rows, []
    return [with_stand_in(row) for row in rows], [n for n, row in enumerate(rows) if ends_with_question(row)]
