"""Rows of several conversations as one sample of several segments: preference pairs, labelled answers, queries with candidates.

A labelled answer brings the same conversation with the answer of another row, from which KTO estimates how far the policy has moved.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import replace

import torch

from zoo.config.schema import EmbedConfig
from zoo.data.errors import RowError
from zoo.data.media.sizes import SampleSize
from zoo.data.sample import Sample
from zoo.data.sources.formats.tags import plain
from zoo.data.sources.identity import medium_content
from zoo.data.sources.mixture import SampleId
from zoo.data.sources.row_set import RowSet
from zoo.data.sources.rows import PLACEHOLDER, Message, Row

PLAIN_QUERY = "Instruct: {}\nQuery:{}"  # as Qwen3-Embedding's


def rows_of(row: Row) -> tuple[Row, Row]:
    """The conversations with the chosen and the rejected answer; answers that both have carry no label.

    Raises:
        RowError: the row has no rejected answer, or a broken one, the same one twice, or weights ("pair").
    """
    other = row.rejected
    if isinstance(other, RowError):
        raise RowError(row.source, other.cause, f"in the rejected answer: {other.args[-1]}")
    if other is None:
        text = "the row has no rejected answer; a preference pair has chosen and rejected, or a rejected_response."
        raise RowError(row.source, "pair", text)
    if row.weight != 1 or row.weights or other.weights:
        text = "the row has a weight, and every preference pair counts alike; take it out."
        raise RowError(row.source, "pair", text)
    turns = [_turns(conversation) for conversation in (row, other)]
    shared = 0
    while shared < min(map(len, turns)) and turns[0][shared] == turns[1][shared]:
        shared += 1
    if (row.tools, row.use_audio_in_video) != (other.tools, other.use_audio_in_video):
        shared = 0  # what is said first is said under other conditions
    for conversation in (row, other):
        if not any(message.role == "assistant" for message in conversation.messages[shared:]):
            text = "chosen and rejected answer are the same, behind the same media, or one only goes on where the other ends."
            raise RowError(row.source, "pair", text)
    shared_keys = ("source", "kind", "limits", "trusted", "root", "outside")
    other = replace(other, **{key: getattr(row, key) for key in shared_keys})
    return without_shared(row, shared), without_shared(other, shared)


def _turns(row: Row) -> list[tuple[Message, str, list[object]]]:
    """Each message with its tool calls, and the content of its media."""
    media = {"image": iter(row.images), "video": iter(row.videos), "audio": iter(row.audios)}
    turns = []
    for message, called in zip(row.messages, row.calls or ("",) * len(row.messages), strict=True):
        contents = [medium_content(next(media[kind]), pixels=True) for kind in PLACEHOLDER.findall(message.content)]
        turns.append((message, called, contents))
    return turns


def without_shared(row: Row, shared: int) -> Row:
    """The row with the weight 0 of answers among its first messages."""
    if all(message.role != "assistant" for message in row.messages[:shared]):
        return row
    return replace(row, weights=tuple(float(n >= shared) for n in range(len(row.messages))))


def joined(chosen: Sample, rejected: Sample) -> Sample:
    """The sample of a pair; RowError ("labels") where one of the two has no label."""
    return replace(chosen, weights=None, rejected=_compared(chosen, rejected, ("chosen", "rejected")))


def _compared(sample: Sample, other: Sample, names: tuple[str, str]) -> Sample:
    """The other of two samples to compare, equal media kept once; RowError ("labels") where one of them has no label."""
    for name, each in zip(names, (sample, other), strict=True):
        if not each.num_labels:
            raise RowError(sample.source, "labels", f"the {name} answer has no token to compare.")
    is_same = sample.media.keys() == other.media.keys() and all(
        torch.equal(tensor, other.media[name]) for name, tensor in sample.media.items()
    )
    return replace(other, weights=None, media=sample.media if is_same else other.media)


def joined_size(sizes: Sequence[SampleSize], align: int) -> SampleSize:
    """The size of both samples of a pair, each padded to a multiple of `align`."""
    names = dict.fromkeys(name for size in sizes for name in size.media)
    media = {name: [item for size in sizes for item in size.media.get(name, ())] for name in names}
    segments = tuple(size.length for size in sizes)
    return SampleSize(sum(-(-length // align) * align for length in segments), media, None, segments)


def last_answer(row: Row) -> tuple[Message, str] | None:
    """The row's last message and its tool calls, where it is an answer."""
    if not row.messages or row.messages[-1].role != "assistant":
        return None
    return row.messages[-1], row.calls[-1] if row.calls else ""


def with_other_answer(row: Row, answer: tuple[Message, str]) -> Row:
    """The row, with the same conversation under another row's answer as its `rejected` one.

    Raises:
        RowError: the row has no label, does not end with an answer, or has a weight ("label").
    """
    why: str | None = None
    if row.label is None:
        why = "the row has no label; KTO wants label: true (a desirable answer) or false."
    elif last_answer(row) is None:
        why = "the row does not end with an answer, which its label is of."
    elif row.weight != 1 or row.weights:
        why = "the row has a weight, and every labelled answer counts alike; take it out."
    if why is not None:
        raise RowError(row.source, "label", why)
    message, calls = answer
    all_calls = (*row.calls[:-1], calls) if row.calls else (*[""] * (len(row.messages) - 1), calls)
    other = replace(row, messages=(*row.messages[:-1], message), calls=all_calls if any(all_calls) else ())
    return replace(row, rejected=other)


def labelled_rows_of(row: Row) -> tuple[Row, Row]:
    """The conversation and that with the other answer, of what `with_other_answer` gave; only the last answer has labels."""
    assert isinstance(row.rejected, Row)
    shared = len(row.messages) - 1
    return without_shared(row, shared), without_shared(row.rejected, shared)


def labelled(matched: Sample, other: Sample, desirable: bool) -> Sample:
    """The sample of an answer that brings the other one; RowError ("labels") where one of the two has no label."""
    mismatched = _compared(matched, other, ("own", "other"))
    return replace(matched, weights=None, desirable=desirable, mismatched=mismatched)


def labelled_size(matched: SampleSize, mismatched: SampleSize) -> SampleSize:
    """The longer of the two: they lie in packed rows of their own, which are as long as this one at most."""
    return max(matched, mismatched, key=lambda size: size.length)


def answer_before(rows: RowSet, number: int) -> tuple[Message, str]:
    """The last answer of the nearest row before row `number` that has one; the rows go round.

    Raises:
        RowError: no row has ("label").
    """
    for back in range(1, len(rows) + 1):
        with contextlib.suppress(RowError):
            if (answer := last_answer(rows.row(SampleId((number - back) % len(rows))))) is not None:
                return answer
    raise RowError(rows.name(SampleId(number)), "label", "no row ends with an answer, which labels are of.")


def conversations_of(row: Row, embed: EmbedConfig) -> list[Row]:
    """The query with its instruction, the positive and the negatives, each as it is read.

    Raises:
        RowError: no row of retrieval, or a part that `embed.template` can't write ("retrieval").
    """
    if not row.candidates:
        text = (
            "the row has no query and positive; train.loss=embed wants rows of query, positive and, if any, negatives."
        )
        raise RowError(row.source, "retrieval", text)
    instruction = row.instruction or embed.instruction
    query = replace(row, candidates=())
    if embed.template == "plain":
        return [_plain(query, instruction), *(_plain(candidate, None) for candidate in row.candidates)]
    if instruction and row.messages[0].role != "system":
        calls, names = (("", *texts) if texts else () for texts in (row.calls, row.names))
        query = replace(query, messages=(Message("system", instruction), *row.messages), calls=calls, names=names)
    return [query, *(replace(candidate, limits=row.limits, kind=row.kind) for candidate in row.candidates)]


def _plain(row: Row, instruction: str | None) -> Row:
    if len(row.messages) != 1 or PLACEHOLDER.search(row.messages[0].content):
        text = "it has media or several turns, and embed.template=plain takes texts alone; set embed.template=chat."
        raise RowError(row.source, "retrieval", text)
    text = plain(row.messages[0].content)
    return replace(row, text=PLAIN_QUERY.format(instruction, text) if instruction else text)


def retrieved(samples: Sequence[Sample]) -> Sample:
    """The sample of a row, whose parts know their contents by `key`."""
    query, *candidates = [replace(sample, key=_key(sample)) for sample in samples]
    return replace(query, candidates=tuple(candidates))


def _key(sample: Sample) -> int:
    """63 bits that tell the tokens and media of a sample from others."""
    digest = hashlib.blake2b(sample.input_ids.numpy().tobytes(), digest_size=8)
    for name, tensor in sorted(sample.media.items()):
        digest.update(name.encode() + tensor.float().numpy().tobytes())
    return int.from_bytes(digest.digest(), "little") >> 1
