"""Prompts as vLLM takes them, and its answers as rollouts have them.

A prompt is token ids with one placeholder for each medium, and the media as zoo has decoded them: the frames that zoo takes, the
sound at zoo's rate. vLLM expands the placeholders itself, so what it has read must be what zoo trains on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from zoo.config.entries import MediaLimits
from zoo.config.schema import Recipe
from zoo.data.media.decoding_workers import decoder_for
from zoo.data.media.media_files import LoadedMedia
from zoo.data.media.sampling import Pace
from zoo.data.media.sizes import SOUND_RATE
from zoo.data.sources.references import settings_of_medium
from zoo.data.sources.rows import Row
from zoo.errors import UserError
from zoo.generation.prompts import answered_row
from zoo.rollouts.engine import Rollout, RolloutPrompt
from zoo.types import JsonObject

if TYPE_CHECKING:
    from zoo.data.processors.processor import Processor

type Routing = np.ndarray
"""(tokens, layers with experts, k) int16; -1 where the experts are not known."""


@dataclass(frozen=True)
class Answer:
    """What vLLM gives for a sample of a prompt; fields are those of `Rollout`."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finished: bool
    routing: Routing | None = None

    def rollout(self, prompt: RolloutPrompt, number: int, processor: Processor) -> Rollout:
        """The sample of a number within its group."""
        shown = self.token_ids[:-1] if self.finished else self.token_ids
        routing = None if self.routing is None else torch.from_numpy(self.routing)
        text = processor.answer_text(shown)
        return Rollout(prompt, number, self.token_ids, self.logprobs, self.finished, text, routing)


def request(processor: Processor, recipe: Recipe, row: Row, input_ids: Tensor) -> JsonObject:
    """A prompt of `vllm.LLM.generate`.

    Args:
        row: as `RolloutPrompt` has it.
        input_ids: (L,) of its sample.

    Raises:
        UserError: the row asks for something that vLLM can't be told.
        RowError: a medium is missing or broken.
    """
    if not row.media:
        return {"prompt_token_ids": input_ids.tolist()}
    media = [*row.images, *row.videos, *row.audios]
    if any(settings_of_medium(medium) for medium in media):
        raise UserError(
            f"{row.source}: settings of a single image, video or sound, which vLLM can't be told; leave them out, "
            "or take rl.rollout=zoo"
        )
    if row.use_audio_in_video:
        raise UserError(
            f"{row.source}: a video whose sound is heard, which vLLM reads at times of its own; leave such rows out, or take rl.rollout=zoo"
        )
    usual = MediaLimits.from_data(recipe.data)
    limits = row.limits or usual
    text, loaded = processor.unexpanded(
        answered_row(row, processor.modalities)[0], video_fps=limits.video_fps, max_frames=limits.max_frames,
        pixels=limits.pixels, decoder=decoder_for(recipe.data),
    )  # fmt: skip
    hearing = getattr(processor.hf, "feature_extractor", None)
    short = processor.tokenizer(text)["input_ids"]
    if processor.media_ids.isdisjoint(short):
        raise UserError(
            f"{row.source}: {type(processor.hf).__name__} writes no token in the place of a medium, so vLLM can't be told where it stands; "
            "take rl.rollout=zoo"
        )
    made: JsonObject = {
        "prompt_token_ids": with_placeholders(input_ids.tolist(), short, processor.media_ids),
        "multi_modal_data": multi_modal_data(loaded, getattr(hearing, "hop_length", 1)),
    }
    if limits.pixels != usual.pixels:
        made["mm_processor_kwargs"] = dict(processor.pixel_options(limits.pixels))
    return made


def with_placeholders(expanded: Sequence[int], short: Sequence[int], media: frozenset[int]) -> list[int]:
    """A prompt's ids with one placeholder for each medium.

    Args:
        expanded: of the prompt's sample, with as many placeholders as the media give.
        short: of the same text and more, before that.
        media: ids of placeholders and of the tokens around them, of which the last ends what a medium brings in both.
    """
    ends = [max(n for n, token in enumerate(ids) if token in media) + 1 for ids in (short, expanded)]
    return [*short[: ends[0]], *expanded[ends[1] :]]


def multi_modal_data(media: LoadedMedia, hop: int = 1) -> dict[str, list[Any]]:
    """A row's media as vLLM takes them: images as they are, frames (T, H, W, 3) with their times, samples with their rate.

    `hop`: samples of a frame of a spectrogram. The longest sound keeps whole ones: there transformers drops what is left, and fills up
    the others; vLLM fills up all.
    """
    decoded = media.arguments
    sounds = decoded.get("audio", [])
    most = max(map(len, sounds), default=0)
    data = {
        "image": list(decoded.get("images", ())),
        "video": [_clip(clip, pace) for clip, pace in zip(decoded.get("videos", ()), media.paces, strict=True)],
        "audio": [(clip[: most // hop * hop] if len(clip) == most else clip, SOUND_RATE) for clip in sounds],
    }
    return {kind: items for kind, items in data.items() if items}


def _clip(frames: Tensor, pace: Pace) -> tuple[np.ndarray, JsonObject]:
    """A video whose frames are all taken, and when each is shown."""
    count = len(frames)
    first = round(pace.start * pace.fps)
    shown = {
        "total_num_frames": count,
        "fps": pace.fps,
        "duration": count / pace.fps,
        "frames_indices": [first + number for number in range(count)],
        "video_backend": "zoo",
        "do_sample_frames": False,
    }
    return frames.permute(0, 2, 3, 1).contiguous().numpy(), shown


def check_read(prompt_ids: Sequence[int], input_ids: Sequence[int], alike: Mapping[int, int], source: str) -> None:
    """UserError where vLLM has read another prompt than zoo.

    Args:
        prompt_ids: what vLLM has read.
        input_ids: those of zoo's sample.
        alike: see `Processor.placeholders_of_servers`.
        source: of the row.
    """
    same = [ours == theirs or alike.get(theirs) == ours for ours, theirs in zip(input_ids, prompt_ids, strict=False)]
    if len(prompt_ids) == len(input_ids) and all(same):
        return
    first = same.index(False) if False in same else min(len(prompt_ids), len(input_ids))
    raise UserError(
        f"{source}: vLLM reads {len(prompt_ids)} tokens of the prompt and zoo {len(input_ids)}, which differ from token {first} on; "
        "take rl.rollout=zoo, or other media limits (data.min_pixels, data.max_pixels, data.video_fps)"
    )


def answer(completion: Any, ends: frozenset[int], prompt_tokens: int, sparse: Sequence[int] | None) -> Answer:
    """What vLLM's `CompletionOutput` says.

    Args:
        completion: with the log-probability of each token.
        ends: tokens that end an answer.
        prompt_tokens: of its prompt.
        sparse: numbers of the decoder's layers with experts, where these are wanted.
    """
    tokens = tuple(completion.token_ids)
    logprobs = tuple(
        float(candidates[token].logprob) for token, candidates in zip(tokens, completion.logprobs, strict=True)
    )
    finished = bool(tokens) and tokens[-1] in ends
    routing = None
    if sparse is not None and completion.routed_experts is not None:
        routing = routing_of(completion.routed_experts, prompt_tokens + len(tokens), sparse)
    return Answer(tokens, logprobs, finished, routing)


def routing_of(routed: np.ndarray, tokens: int, sparse: Sequence[int]) -> Routing:
    """The experts of each token out of (S, layers, k) of the first S: the last answered token is read by no layer."""
    known = np.asarray(routed)[:tokens, list(sparse)].astype(np.int16)
    unknown = np.full((tokens - len(known), *known.shape[1:]), -1, np.int16)
    return np.concatenate([known, unknown])
