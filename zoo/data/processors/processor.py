"""`Processor`: rows to samples through a Hugging Face processor, with labels on the assistant's answers.

It guarantees: the token ids and media are those of the HF processor's own call; every answer of the row is labelled,
its end-of-turn token included, and nothing else is (unless other labels are asked for); no medium is; the placeholder
tokens are as many as the media give. Whatever goes wrong is a `RowError` of that row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from zoo.config.entries import MediaLimits, PixelLimits
from zoo.config.memory import ran_out
from zoo.data.errors import RowError
from zoo.data.media.decoder import Decoder
from zoo.data.media.media_files import LoadedMedia, headers_of_media, headers_of_row, load_media, refuse_pixel_keys
from zoo.data.media.sizes import Headers, SampleSize
from zoo.data.processors import chat, plain_turns
from zoo.data.processors import labels as label_spans
from zoo.data.processors.answers import AnswerFinder, ChatMarkers
from zoo.data.processors.augment import Augment
from zoo.data.processors.boxes import THOUSANDTHS, Coordinates, Size, with_boxes
from zoo.data.processors.fitting import Overlong, Sketch, Written, find_fit
from zoo.data.processors.labels import Span
from zoo.data.sample import Sample
from zoo.data.sources.rows import Row
from zoo.data.template_limits import check_template, limit_templates
from zoo.errors import ConfigError, UserError
from zoo.types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from transformers import PretrainedConfig, ProcessorMixin

type ArchConfig = JsonMapping | PretrainedConfig  # an architecture as Hugging Face writes it
type CallArguments = dict[str, Any]  # of a Hugging Face processor
type Features = Mapping[str, Any]  # that such a processor returns: tensors, arrays and lists by name

AS_IT_IS = PixelLimits()  # of the processor


class Processor:
    """Encodes rows with a Hugging Face processor; families override `modalities` and the hooks at the end.

    Args:
        hf: a `transformers.ProcessorMixin` with a tokenizer and a chat template.
        markers: how its chat template writes an assistant's turn.

    Raises:
        UserError: the markers are not what the tokenizer or the template knows.
    """

    modalities: tuple[str, ...] = ("text", "image", "video", "audio")  # what rows may hold
    coordinates: Coordinates = THOUSANDTHS  # how boxes are written
    pixels_of_token = 0  # pixels of an image that one token stands for; 0: there are no limits of pixels

    def __init__(self, hf: ProcessorMixin, markers: ChatMarkers) -> None:
        limit_templates()
        self.hf, self.tokenizer, self.markers = hf, hf.tokenizer, markers
        self._header = self.tokenizer.encode(markers.header, add_special_tokens=False)
        end = self.tokenizer.encode(markers.end, add_special_tokens=False)
        special = chat.SpecialTokens(self.tokenizer)
        if len(end) != 1 or (self._header and self._header[0] not in special.ids.values()):
            text = f"The tokenizer has no special tokens for the turn markers {markers.header!r} and {markers.end!r}"
            raise UserError(f"{text}; it is not the tokenizer of this family.")
        template = getattr(hf, "chat_template", None)
        if not template:
            raise UserError("The processor has no chat template; copy chat_template.jinja into its folder.")
        if isinstance(template, str):
            check_template(template, self.tokenizer.name_or_path)
        self._end = end[0]
        self._answers = AnswerFinder(self.tokenizer, markers)
        self._opening = self.tokenizer.decode(self.tokenizer("")["input_ids"])
        self._eos, self.special = self.tokenizer.eos_token_id, special
        self._template: JsonObject = {}

    @property
    def pad_id(self) -> int:
        """Token id that padding is written with."""
        return self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self._end

    @cached_property
    def ends(self) -> dict[str, int]:
        """Text -> id of the tokens that end what training teaches: answers, by the template's markers, and plain texts."""
        return self._answers.ends if self._eos is None else self._answers.ends | {self.tokenizer.eos_token: self._eos}

    def encode(self, row: Row, **options: Any) -> Sample:
        """One row as a sample; `options` and errors are those of `encode_both`."""
        return self.encode_both(row, **options)[0]

    def encode_both(
        self,
        row: Row,
        *,
        video_fps: float,
        max_frames: int,
        augment: Augment | None = None,
        labels: str = "assistant",
        decoder: Decoder | None = None,
        pixels: PixelLimits = AS_IT_IS,
        overlong: Overlong | None = None,
    ) -> tuple[Sample, CallArguments]:
        """One row as a sample, and what the HF processor returned, which transformers' model takes as arguments.

        Args:
            row: a checked row.
            video_fps: frames taken per second of video.
            max_frames: most frames taken of one video.
            augment: changes the media, or None.
            labels: assistant (all answers), last (the last one) or all (every token of text); of a plain text all are.
            decoder: who decodes the media; None: worker processes with the default limits of data.row_seconds and data.row_mb.
            pixels: how large images and videos may be.
            overlong: what becomes of a sample over a budget. Images and videos that are made smaller get the same limit, and
                none fewer pixels than the processor, or `pixels`, has as the least.

        Raises:
            RowError: a media file that is missing or broken ("missing_file", "corrupt_media"), a special token in the texts
                ("special_token_in_text"), a complaint of the HF processor ("processor_error"), answers that can't be found in the
                tokens ("labels"), or not as many placeholder tokens as the media give ("placeholder_mismatch").
        """
        self.special.check(row, self.media_ids)
        if row.text is not None:
            return self._plain_text(row, row.text)
        if not self.pixels_of_token:
            refuse_pixel_keys(row, type(self.hf).__name__)
        try:
            media = load_media(row, video_fps, max_frames, decoder)
        except RowError as error:
            raise error.at(row.source) from error
        files = [image.size[::-1] for image in media.arguments.get("images", ())]
        if augment is not None and augment.strength:
            media.arguments = augment.media(media.arguments)
        try:
            written = self._written(row, files, headers_of_media(media, row), pixels)
            fit = find_fit(self, written, pixels, overlong) if overlong and overlong.shrink else None
            if fit is not None:
                written = self._written(row, files, replace(written.headers, capped=True), fit.pixels)
            arguments = self._arguments(written, media, pixels if fit is None else fit.pixels)
            features = self.call_hf(written.text, arguments)
            input_ids = as_tensor(features["input_ids"][0], torch.int64)
            tensors = self.media_tensors(features)
            if overlong and not overlong.shrink and len(input_ids) > overlong.budget:
                fit = find_fit(self, written, pixels, overlong)
        except RowError as error:
            raise error.at(row.source) from error
        except Exception as error:  # whatever a processor raises, it is about this row
            if ran_out(error):
                raise
            message = " ".join(str(error).split()).rstrip(".")
            reason = f"{type(self.hf).__name__} refuses the row: {type(error).__name__}: {message}."
            raise RowError(row.source, "processor_error", reason) from error
        row = written.row
        self._check_placeholders(row, input_ids, tensors)
        if self._header or row.prompt:
            spans = [] if row.prompt else self._answers.spans(row, input_ids)
        else:
            try:
                spans = plain_turns.spans(self.tokenizer, written.text, written.answers, input_ids, self.media_ids)
            except ValueError as error:
                raise RowError(row.source, "labels", f"{error}.") from error
        chosen = label_spans.choose(spans, row.answer_weights, labels, len(input_ids), row.weight)
        targets, weights = label_spans.labelled(input_ids, chosen, self.media_ids)
        sample = Sample(input_ids, targets, tensors, row.kind, row.source, weights, fit)
        return sample, self.model_inputs(row, dict(features))

    def unexpanded(
        self, row: Row, *, video_fps: float, max_frames: int, pixels: PixelLimits, decoder: Decoder | None = None
    ) -> tuple[str, LoadedMedia]:
        """What a program with a processor of its own is given for a conversation: its text with a placeholder for each medium, and the media.

        Arguments and errors are those of `encode_both`.
        """
        try:
            media = load_media(row, video_fps, max_frames, decoder)
            files = [image.size[::-1] for image in media.arguments.get("images", ())]
            return self._written(row, files, headers_of_media(media, row), pixels).text, media
        except RowError as error:
            raise error.at(row.source) from error

    def _plain_text(self, row: Row, text: str) -> tuple[Sample, CallArguments]:
        """A text as it is, with the end of sequence behind it: all of it is learnt. A prompt is what the tokenizer makes of it."""
        ids = self.tokenizer(text)["input_ids"]
        ids += [] if self._eos is None or row.prompt or ids[-1:] == [self._eos] else [self._eos]
        input_ids = torch.tensor(ids, dtype=torch.int64)
        chosen = torch.full((len(ids),), 0.0 if row.prompt else row.weight)
        targets, weights = label_spans.labelled(input_ids, chosen, self.media_ids)
        sample = Sample(input_ids, targets, {}, row.kind, row.source, weights)
        return sample, {"input_ids": input_ids[None], "attention_mask": torch.ones_like(input_ids[None])}

    def measure(
        self,
        row: Row,
        *,
        video_fps: float,
        max_frames: int,
        decoder: Decoder | None = None,
        pixels: PixelLimits = AS_IT_IS,
        overlong: Overlong | None = None,
    ) -> SampleSize | None:
        """What `encode` will give, without decoding media, by the same arguments; None where only encoding gives the size.

        The size of a file that is missing or broken is not known either: encoding says what is wrong with it.

        Raises:
            RowError: a special token in the texts, or a complaint of the chat template.
        """
        self.special.check(row, self.media_ids)
        if row.text is not None:
            return self.size(self._plain_text(row, row.text)[0])
        if not self.pixels_of_token:
            refuse_pixel_keys(row, type(self.hf).__name__)
        try:
            headers = headers_of_row(row, video_fps, max_frames, decoder)
            if headers is None:
                return None
            written = self._written(row, headers.images, headers, pixels)
            fit = find_fit(self, written, pixels, overlong)
            if fit is not None and fit.done:
                headers, pixels = replace(headers, capped=True), fit.pixels
                written = self._written(row, headers.images, headers, pixels)
            sketch = self.sketch(written.row, written.text, headers, pixels)
            length = 0 if sketch is None else self.sketch_length(sketch)
        except RowError as error:
            raise error.at(row.source) from error
        except Exception as error:  # encoding names the cause
            if ran_out(error):
                raise
            return None
        return None if sketch is None else SampleSize(length, sketch.rows, fit)

    def size(self, sample: Sample) -> SampleSize:
        """The size of an encoded sample."""
        return SampleSize(sample.length, self.tower_rows(sample.media), sample.fit)

    def set_template(self, arguments: JsonMapping) -> None:
        """Arguments of the chat template, of every row; `check_template_arguments` says which are refused."""
        chat.check_template_arguments(self.hf, arguments)
        self._template = dict(arguments)

    def allow_special_tokens(self, tokens: Sequence[str]) -> None:
        """Special tokens that the texts of rows may hold; `SpecialTokens.allow` says which are refused."""
        further = map(self.tokenizer.convert_tokens_to_ids, self.markers.further_ends)
        control = {*self._header[:1], self._end, *further}
        self.special.allow(tokens, control | self.media_ids)

    def answer_text(self, tokens: Sequence[int]) -> str:
        """An answer's tokens as text, without special tokens but those that rows' texts may hold."""
        return str(self.tokenizer.decode(self.special.without(tokens), clean_up_tokenization_spaces=False)).strip()

    def check_pixels(self, keys: Sequence[str]) -> None:
        """Refuse settings that need limits of pixels, as typed ("data.max_pixels"); ConfigError where the HF processor has none."""
        if not self.pixels_of_token:
            reason = "has no limits of pixels, as it makes tiles of a fixed size of every image"
            raise ConfigError(f"{', '.join(keys)}: {type(self.hf).__name__} {reason}; leave it out.")

    @cached_property
    def wants_thoughts(self) -> bool:
        """Whether the chat template reads thinking under `reasoning_content` alone."""
        return chat.wants_thoughts(self._render)

    def save(self, folder: str | Path) -> None:
        """Write the HF processor's files (tokenizer and chat template included) into `folder`."""
        self.hf.save_pretrained(folder)

    def messages(self, row: Row) -> list[JsonObject]:
        """The row as the chat template takes it."""
        return chat.chat_messages(row)

    def call_options(self, row: Row, media: LoadedMedia) -> CallArguments:
        """Further arguments of the HF processor's call, or other ones than `media.arguments`."""
        return {}

    def call_hf(self, text: str, arguments: Mapping[str, Any]) -> Features:
        """What the HF processor makes of a text with its media; `arguments` are those of its call."""
        features: Features = self.hf(text=text, **arguments)
        return features

    def pixel_options(self, pixels: PixelLimits) -> dict[str, CallArguments]:
        """Limits of pixels as arguments of the HF processor's call: {"images_kwargs": ..., "videos_kwargs": ...}."""
        return {}

    def stored_limits(self, pixels: PixelLimits) -> dict[str, CallArguments]:
        """The same as attributes of the HF processor's parts, for files that say what `pixels` say in a call."""
        return self.pixel_options(pixels)

    def own_sizes(self, media: Mapping[str, list], headers: Headers, pixels: PixelLimits) -> CallArguments:
        """Arguments of the HF processor's call for images and videos of which some have settings of their own: resized, and not to be again."""
        return {}

    def image_sizes(self, headers: Headers, pixels: PixelLimits) -> Sequence[Size]:
        """(height, width) of a row's images as the towers read them, where `coordinates` are in pixels."""
        return ()

    def least_pixels(self, pixels: PixelLimits) -> tuple[int, int]:
        """The fewest pixels of an image, and of a video as its limit counts, which data.overlong=shrink keeps to."""
        return 1, 1

    def most_pixels(self, headers: Headers, pixels: PixelLimits) -> tuple[int, int]:
        """Pixels of the largest image and video of a row once resized; 0 where it has none."""
        return 0, 0

    def media_tensors(self, features: Features) -> dict[str, Tensor]:
        """The towers' tensors out of the HF processor's result; each can be joined along dim 0 over samples."""
        return {}

    def model_inputs(self, row: Row, features: CallArguments) -> CallArguments:
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

    def sketch(self, row: Row, text: str, headers: Headers, pixels: PixelLimits) -> Sketch | None:
        """The arithmetic of `measure`: `text`, what the chat template writes, with placeholders that stand for less than they will.

        None where only encoding gives the size.
        """
        return None if row.media else Sketch(text, 0, {})

    @cached_property
    def media_ids(self) -> frozenset[int]:
        """Ids of the placeholder tokens and of the tokens around them: text is never cut before one of these."""
        return frozenset()

    @cached_property
    def placeholders_of_servers(self) -> Mapping[int, int]:
        """Id of a placeholder that servers write -> the one in samples, where the model reads both alike."""
        return {}

    def options_of_servers(self, limits: MediaLimits) -> CallArguments:
        """Arguments of transformers' processor that a server has to be given, as no file of a folder says them."""
        return {}

    def sketch_length(self, sketch: Sketch) -> int:
        """Tokens of the sample of a sketch."""
        return len(self.tokenizer(sketch.text)["input_ids"]) + sketch.further

    def _written(self, row: Row, files: Sequence[Size], headers: Headers, pixels: PixelLimits) -> Written:
        """The row under limits of pixels, which boxes may follow; `files` are the sizes of its images in their files."""
        row = with_boxes(row, self.coordinates, files, lambda: self.image_sizes(headers, pixels))
        return Written(row, *self._text(row), headers)

    def _arguments(self, written: Written, media: LoadedMedia, pixels: PixelLimits) -> CallArguments:
        """The arguments of the HF processor's call beside the text."""
        options = self.call_options(written.row, media)
        own_sizes = self.own_sizes(media.arguments, written.headers, pixels)
        further = self.pixel_options(pixels) | {f"{kind}_kwargs": {"do_resize": False} for kind in own_sizes}
        for name, values in further.items():
            if name.removesuffix("_kwargs") in media.arguments:
                options[name] = {**options.get(name, {}), **values}
        return {**media.arguments, "return_tensors": "pt", **options, **own_sizes}

    def _text(self, row: Row) -> tuple[str, list[Span]]:
        """What the chat template writes, and, where turns begin with plain text, where the answers stand in it."""
        messages, options = self.messages(row), {"tools": json.loads(row.tools)} if row.tools else {}
        options |= {"add_generation_prompt": True} if row.prompt else {}
        if any("</think>" in content for _, content in row.messages) and self.wants_thoughts:
            messages = chat.with_thoughts(messages)
        if self._header or row.prompt:
            text, answers = self._render(messages, **options), list[Span]()
            if self.markers.further_ends and messages[-1]["role"] == "assistant":
                text += self.markers.end
        else:
            text, answers = plain_turns.write(partial(self._render, **options), messages, self.markers.end)
        chat.check_written(row, text)
        return text, answers

    def _render(self, messages: Sequence[JsonObject], **options: Any) -> str:
        """What the chat template writes, without the first token that the tokenizer puts before any text anyway."""
        text: str = self.hf.apply_chat_template(list(messages), tokenize=False, **{**self._template, **options})
        return text.removeprefix(self._opening)

    def _check_placeholders(self, row: Row, input_ids: Tensor, media: Mapping[str, Tensor]) -> None:
        for token, wanted in self.expected_tokens(media).items():
            seen = int((input_ids == self.tokenizer.convert_tokens_to_ids(token)).sum())
            if seen != wanted:
                text = f"{seen} {token} in the tokens but the media give {wanted}; check the texts and the processor."
                raise RowError(row.source, "placeholder_mismatch", text)


def as_tensor(value: object, dtype: torch.dtype) -> Tensor:
    """A tensor of `dtype` from what a processor returns: a tensor, an array or a list."""
    return torch.as_tensor(value if isinstance(value, Tensor) else np.asarray(value), dtype=dtype)
