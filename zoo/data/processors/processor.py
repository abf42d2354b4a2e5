"""`Processor`: rows to samples through a Hugging Face processor, with labels on the assistant's answers.

It guarantees: the token ids and media are those of the HF processor's own call; every answer of the row is labelled,
its end-of-turn token included, and nothing else is (unless other labels are asked for); no medium is; the placeholder
tokens are as many as the media give. Whatever goes wrong is a `RowError` of that row.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zoo.config.memory import ran_out
from zoo.data.errors import RowError
from zoo.data.media.decoder import HERE, Decoder, Room
from zoo.data.media.sizes import Headers, SampleSize, headers_of
from zoo.data.processors import labels as label_spans
from zoo.data.processors import plain_turns
from zoo.data.processors.augment import Augment, augmented
from zoo.data.processors.chat import (
    call_begins,
    chat_messages,
    check_tools,
    tools_of,
    wants_thoughts,
    with_boxes,
    with_thoughts,
)
from zoo.data.processors.labels import Span
from zoo.data.sample import Sample
from zoo.data.sources.references import Medium, is_url
from zoo.data.sources.rows import PLACEHOLDER, Row
from zoo.errors import UserError


@dataclass(frozen=True)
class ChatMarkers:
    """How a chat template writes an assistant's turn.

    The header must begin with a special token that begins every turn: special tokens are refused in the rows' texts, so
    that only the template can open a turn. Where turns begin with plain text, it is empty (`zoo.data.processors.plain_turns`).
    """

    header: str  # "<|im_start|>assistant\n"
    end: str  # "<|im_end|>"; has loss


class Sketch(NamedTuple):
    """A row's text before its placeholders are expanded, and what its media add."""

    text: str  # to tokenize
    further: int  # tokens that the placeholders will be more
    rows: dict[str, list[int]]  # tower -> rows of each item, as `Processor.tower_rows` gives them


class Processor:
    """Encodes rows with a Hugging Face processor; families override `modalities` and the hooks at the end.

    Args:
        hf: a `transformers.ProcessorMixin` with a tokenizer and a chat template.
        markers: how its chat template writes an assistant's turn.

    Raises:
        UserError: the markers are not what the tokenizer or the template knows.
    """

    modalities: tuple[str, ...] = ("text", "image", "video", "audio")  # what rows may hold

    def __init__(self, hf: Any, markers: ChatMarkers) -> None:
        self.hf = hf
        self.tokenizer = hf.tokenizer
        self.markers = markers
        self._header = self.tokenizer.encode(markers.header, add_special_tokens=False)
        end = self.tokenizer.encode(markers.end, add_special_tokens=False)
        special = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        if len(end) != 1 or (self._header and self.tokenizer.decode(self._header[:1]) not in special):
            raise UserError(
                f"The tokenizer has no special tokens for the turn markers {markers.header!r} and {markers.end!r}; "
                "it is not the tokenizer of this family."
            )
        if not getattr(hf, "chat_template", None):
            raise UserError("The processor has no chat template; copy chat_template.jinja into its folder.")
        self._end = end[0]
        first = self.tokenizer("")["input_ids"]
        self._opening, self._eos = self.tokenizer.decode(first), self.tokenizer.eos_token_id
        self._special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))))

    @property
    def pad_id(self) -> int:
        """Token id that padding is written with."""
        return self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self._end

    @property
    def end_id(self) -> int:
        """Id of the token that ends an answer."""
        return self._end

    def encode(
        self,
        row: Row,
        *,
        video_fps: float,
        max_frames: int,
        augment: Augment | None = None,
        labels: str = "assistant",
        decoder: Decoder = HERE,
    ) -> Sample:
        """One row as a sample.

        Args:
            row: a checked row.
            video_fps: frames taken per second of video.
            max_frames: most frames taken of one video.
            augment: changes the media, or None.
            labels: assistant (all answers), last (the last one) or all (every token of text); of a plain text all are.
            decoder: who decodes the media.

        Raises:
            RowError: a media file that is missing or broken ("missing_file", "corrupt_media"), a special token of the
                tokenizer in the texts ("special_token_in_text"), a complaint of the HF processor ("processor_error"),
                answers that can't be found in the tokens ("labels"), placeholder tokens that are not as many as the
                media give ("placeholder_mismatch").
        """
        return self.encode_both(
            row, video_fps=video_fps, max_frames=max_frames, augment=augment, labels=labels, decoder=decoder
        )[0]

    def encode_both(
        self,
        row: Row,
        *,
        video_fps: float,
        max_frames: int,
        augment: Augment | None = None,
        labels: str = "assistant",
        decoder: Decoder = HERE,
    ) -> tuple[Sample, dict[str, Any]]:
        """As `encode`, and what the HF processor returned, which transformers' model takes as arguments."""
        self._refuse_special_tokens(row)
        if row.text is not None:
            return self._plain_text(row, row.text)
        try:
            media, fps = self._load(row, video_fps, max_frames, decoder)
        except RowError as error:
            raise error.at(row.source) from error
        row = with_boxes(row, [image.size[::-1] for image in media.get("images", ())])
        if augment is not None and augment.strength:
            media = augmented(media, augment)
        try:
            text, answers = self._text(row)
            arguments = {**media, "return_tensors": "pt", **self.call_options(row, media, fps)}
            features = self.hf(text=text, **arguments)
            input_ids = as_tensor(features["input_ids"][0], torch.int64)
            tensors = self.media_tensors(features)
        except RowError as error:
            raise error.at(row.source) from error
        except Exception as error:  # whatever a processor raises, it is about this row
            if ran_out(error):
                raise
            said = " ".join(str(error).split()).rstrip(".")
            reason = f"{type(self.hf).__name__} refuses the row: {type(error).__name__}: {said}."
            raise RowError(row.source, "processor_error", reason) from error
        self._check_placeholders(row, input_ids, tensors)
        if self._header:
            spans = self._spans(row, input_ids)
        else:
            spans = self._plain_spans(row, text, answers, input_ids)
        chosen = label_spans.choose(spans, row.answer_weights, labels, len(input_ids), row.weight)
        targets, weights = label_spans.labelled(input_ids, chosen, self.media_ids)
        sample = Sample(input_ids, targets, tensors, row.kind, row.source, weights)
        return sample, self.model_inputs(row, dict(features))

    def _plain_text(self, row: Row, text: str) -> tuple[Sample, dict[str, Any]]:
        """A text as it is, with the end of sequence behind it: all of it is learnt."""
        ids = self.tokenizer(text)["input_ids"]
        ids += [] if self._eos is None or ids[-1:] == [self._eos] else [self._eos]
        input_ids = torch.tensor(ids, dtype=torch.int64)
        chosen = torch.full((len(ids),), row.weight)
        targets, weights = label_spans.labelled(input_ids, chosen, self.media_ids)
        sample = Sample(input_ids, targets, {}, row.kind, row.source, weights)
        return sample, {"input_ids": input_ids[None], "attention_mask": torch.ones_like(input_ids[None])}

    def measure(
        self, row: Row, *, video_fps: float, max_frames: int, decoder: Decoder = HERE
    ) -> SampleSize | None:
        """What `encode` will give, without decoding media; None where only encoding gives the size.

        The size of a file that is missing or broken is not known either: encoding says what is wrong with it.

        Raises:
            RowError: a special token in the texts, or a complaint of the chat template.
        """
        self._refuse_special_tokens(row)
        if row.text is not None:
            return self.size(self._plain_text(row, row.text)[0])
        try:
            headers = self._headers(row, video_fps, max_frames, decoder)
            if headers is None:
                return None
            row = with_boxes(row, headers.images)
            sketch = self.sketch(row, self._text(row)[0], headers)
            if sketch is None:
                return None
            length = len(self.tokenizer(sketch.text)["input_ids"]) + sketch.further
        except RowError as error:
            raise error.at(row.source) from error
        except Exception as error:  # encoding names the cause
            if ran_out(error):
                raise
            return None
        return SampleSize(length, sketch.rows)

    def size(self, sample: Sample) -> SampleSize:
        """The size of an encoded sample."""
        return SampleSize(sample.length, self.tower_rows(sample.media))

    def save(self, folder: str | Path) -> None:
        """Write the HF processor's files (tokenizer and chat template included) into `folder`."""
        self.hf.save_pretrained(folder)

    # ---------------------------------------------------------------- what a family overrides

    def messages(self, row: Row) -> list[dict[str, Any]]:
        """The row as the chat template takes it."""
        return chat_messages(row)

    def call_options(self, row: Row, media: Mapping[str, list], fps: float | None) -> dict[str, Any]:
        """Further arguments of the HF processor's call, or other ones than `media`; `fps` is that of the videos, in Hz."""
        return {}

    def media_tensors(self, features: Mapping[str, Any]) -> dict[str, Tensor]:
        """The towers' tensors out of the HF processor's result; each can be joined along dim 0 over samples."""
        return {}

    def model_inputs(self, row: Row, features: dict[str, Any]) -> dict[str, Any]:
        """Arguments of transformers' model, from what its processor returned for the row."""
        return features

    def incomparable(self, sample: Sample) -> str | None:
        """Why transformers' model gives another result for a sample, where that is known and right; None where it does not."""
        return None

    def expected_tokens(self, media: Mapping[str, Tensor]) -> dict[str, int]:
        """How many of each placeholder token the media give: {"<|image_pad|>": 12}."""
        return {}

    def tower_rows(self, media: Mapping[str, Tensor]) -> dict[str, list[int]]:
        """Tower -> rows (patches, tiles, mel frames) of each item that it sees by itself."""
        return {}

    def sketch(self, row: Row, text: str, headers: Headers) -> Sketch | None:
        """The arithmetic of `measure`: a text to tokenize in which placeholders stand for less than they will.

        Args:
            row: a checked row.
            text: what the chat template writes, a placeholder for each medium.
            headers: of the row's files.

        Returns:
            None where only encoding gives the size.
        """
        return None if row.media else Sketch(text, 0, {})

    @cached_property
    def media_ids(self) -> frozenset[int]:
        """Ids of the placeholder tokens and of the tokens around them: text is never cut before one of these."""
        return frozenset()

    # ---------------------------------------------------------------- inside

    def _text(self, row: Row) -> tuple[str, list[Span]]:
        """What the chat template writes, and, where turns begin with plain text, where the answers stand in it."""
        messages, options = self.messages(row), tools_of(row)
        if any("</think>" in content for _, content in row.messages) and self._wants_thoughts:
            messages = with_thoughts(messages)
        answers: list[Span] = []
        if self._header:
            text = self._render(messages, **options)
        else:
            text, answers = plain_turns.write(partial(self._render, **options), messages, self.markers.end)
        check_tools(row, text)
        return text, answers

    def _render(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        """What the chat template writes, without the first token that the tokenizer puts before any text anyway."""
        text: str = self.hf.apply_chat_template(list(messages), tokenize=False, **options)
        return text.removeprefix(self._opening)

    _wants_thoughts = cached_property(lambda self: wants_thoughts(self._render))

    def _refuse_special_tokens(self, row: Row) -> None:
        texts = [(f"messages[{n}]", PLACEHOLDER.sub(" ", said)) for n, (_, said) in enumerate(row.messages)]
        texts += [(f"messages[{n}].tool_calls", called) for n, called in enumerate(row.calls)]
        texts += [("tools", row.tools)]
        for where, said in texts if row.text is None else [("text", row.text)]:
            found = self._special.search(said)
            if found:
                text = f"{where} contains {found[0]!r}, a special token of the tokenizer; take it out."
                raise RowError(row.source, "special_token_in_text", text)

    def _load(
        self, row: Row, fps: float, max_frames: int, decoder: Decoder
    ) -> tuple[dict[str, list], float | None]:
        """The row's media as arguments of the HF processor, and the rate of its videos."""
        media: dict[str, list] = {}
        room = Room(decoder.megabytes)
        if row.images:
            media["images"] = [room.take(decoder.image(image, row)) for image in row.images]
        rate = None
        if row.videos:
            clips = []
            for video in row.videos:
                frames, taken = decoder.video(video, row, fps, max_frames)
                clips.append((room.take(frames), taken))
            # HF processors take one rate for all videos of a call, so a thinned one thins the others.
            rate = min(clip[1] for clip in clips)
            clips = [
                clip if clip[1] == rate else decoder.video(video, row, rate, max_frames)
                for video, clip in zip(row.videos, clips, strict=True)
            ]
            media["videos"] = [frames for frames, _ in clips]
        sounds = [room.take(decoder.audio(sound, row)) for sound in sound_files(row)]
        if sounds:
            media["audio"] = sounds
        return media, rate

    def _headers(self, row: Row, fps: float, max_frames: int, decoder: Decoder) -> Headers | None:
        """What the headers of the row's media say; None where a header does not hold what decoding will give."""
        sounds = sound_files(row)
        if any(is_url(medium) for medium in (*row.images, *row.videos, *sounds)):
            return None
        sizes = [decoder.image_size(image, row) for image in row.images]
        clips = [decoder.video_size(video, row) for video in row.videos]
        samples = [decoder.sound_samples(sound, row) for sound in sounds]
        images = [size for size in sizes if size is not None]
        videos = [clip for clip in clips if clip is not None]
        heard = [count for count in samples if count is not None]
        if (len(images), len(videos), len(heard)) != (len(sizes), len(clips), len(samples)):
            return None
        return headers_of(images, videos, heard, fps, max_frames)

    def _check_placeholders(self, row: Row, input_ids: Tensor, media: Mapping[str, Tensor]) -> None:
        for token, wanted in self.expected_tokens(media).items():
            seen = int((input_ids == self.tokenizer.convert_tokens_to_ids(token)).sum())
            if seen != wanted:
                text = f"{seen} {token} in the tokens but the media give {wanted}; check the texts and the processor."
                raise RowError(row.source, "placeholder_mismatch", text)

    def _spans(self, row: Row, input_ids: Tensor) -> list[Span]:
        """Tokens of each answer, its end-of-turn token included."""
        ids = input_ids.tolist()
        spans = list(self._answers(ids))
        wanted = sum(role == "assistant" for role, _ in row.messages)
        if len(spans) != wanted:
            text = f"{len(spans)} answers found in the tokens but {wanted} in the row; does the chat template fit?"
            raise RowError(row.source, "labels", text)
        calls = row.calls or ("",) * len(row.messages)
        turns = zip(row.messages, calls, strict=True)
        said = [(content, called) for (role, content), called in turns if role == "assistant"]
        return [
            Span(self._answer_begins(ids, span, *answer, row.source), span.end)
            for span, answer in zip(spans, said, strict=True)
        ]

    def _plain_spans(self, row: Row, text: str, answers: list[Span], input_ids: Tensor) -> list[Span]:
        try:
            return plain_turns.spans(self.tokenizer, text, answers, input_ids, self.media_ids)
        except ValueError as error:
            raise RowError(row.source, "labels", f"{error}.") from error

    def _answer_begins(self, ids: list[int], span: Span, answer: str, calls: str, source: str) -> int:
        """The token of the span at which the row's answer begins, behind the text that the template puts before it."""
        if PLACEHOLDER.search(answer):
            return span.start
        body = self._decode(ids[span.start : span.end - 1])
        if not calls and not body.endswith(answer):  # a tokenizer may normalise letters (NFC, in Qwen's)
            answer = self._decode(self.tokenizer.encode(answer, add_special_tokens=False))
        try:
            if calls:
                before = call_begins(body, answer, [one["name"] for one in json.loads(calls)])
            else:
                before = label_spans.answer_begins(body, answer)
        except ValueError as error:
            raise RowError(source, "labels", f"{error}; does the chat template fit?") from error
        count = 0
        while before and len(self._decode(ids[span.start : span.start + count])) < before:
            count += 1
        return span.start + count

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def _answers(self, ids: list[int]) -> Iterator[Span]:
        """Tokens of each assistant's turn behind its header, the end-of-turn token included."""
        turns = [index for index, token in enumerate(ids) if token == self._header[0]]
        for turn, limit in itertools.pairwise([*turns, len(ids)]):
            start = self._after_header(ids, turn)
            if start is not None and self._end in ids[start:limit]:
                yield Span(start, ids.index(self._end, start) + 1)

    def _after_header(self, ids: list[int], turn: int) -> int | None:
        """The token behind the header of the turn that begins at `turn`; None for another role's turn."""
        size = len(self._header)
        if ids[turn : turn + size] == self._header:
            return turn + size
        # An answer that begins with line breaks may share a token with the header's own; that one has no loss.
        text = self.tokenizer.decode(ids[turn : turn + size], clean_up_tokenization_spaces=False)
        return turn + size if text.startswith(self.markers.header) else None


def sound_files(row: Row) -> list[Medium]:
    """The row's sounds in the order in which they are heard, sound tracks of its videos included."""
    audios, videos = iter(row.audios), iter(row.videos)
    names = []
    for _, content in row.messages:
        for mark in PLACEHOLDER.findall(content):
            if mark == "audio":
                names.append(next(audios))
            elif mark == "video":
                video = next(videos)
                names += [video] if row.use_audio_in_video else []
    return names


def as_tensor(value: Any, dtype: torch.dtype) -> Tensor:
    """A tensor of `dtype` from what a processor returns: a tensor, an array or a list."""
    if isinstance(value, Tensor):
        return value.to(dtype)
    return torch.as_tensor(np.asarray(value), dtype=dtype)
