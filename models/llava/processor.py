"""LLaVA's processor: images and videos in tiles, through the variant's own processor of transformers.

Media tensors of a sample (each joined along dim 0 over samples), a tile being (3, S, S) float32:
pixel_values (N, 3, S, S), the tiles of all images, the whole image first; image_tiles (n, 3) int64, an image's height
and width in pixels and its number of tiles; pixel_values_videos (F, 3, S, S), the frames of all videos; video_ends
(F,) int64, 1 at the last frame of a video and 0 elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo.config.entries import PixelLimits
from zoo.data.media.media_files import LoadedMedia
from zoo.data.media.sizes import Headers
from zoo.data.processors.answers import ChatMarkers
from zoo.data.processors.boxes import Coordinates
from zoo.data.processors.fitting import Sketch
from zoo.data.processors.processor import Processor, as_tensor
from zoo.data.processors.vision import load_processor
from zoo.data.sources.rows import Row
from zoo.data.tokenizer import ROOT as TINY_TOKENIZER
from zoo.errors import ConfigError
from zoo.models.llava.config import LlavaConfig
from zoo.types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

KINDS = {"llava": "LlavaProcessor", "llava_next": "LlavaNextProcessor", "llava_onevision": "LlavaOnevisionProcessor"}
# Vicuna's, of LLaVA 1.5 and part of 1.6 (conv_vicuna_v1 of the LLaVA authors), for folders without a template.
VICUNA = """\
{%- for message in messages -%}
{%- if message.role == 'user' %}{{ 'USER: ' }}{% elif message.role == 'assistant' %}{{ 'ASSISTANT: ' }}{% endif -%}
{%- for part in message.content -%}{{ part.text if part.type == 'text' else '<image>\\n' }}{%- endfor -%}
{{- eos_token if message.role == 'assistant' else ' ' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'ASSISTANT:' }}{%- endif -%}
"""


class LlavaProcessor(Processor):
    """`Processor` around transformers' processor of the variant."""

    modalities: tuple[str, ...] = ("text", "image", "video")  # OneVision's; the others take no videos
    coordinates = Coordinates("shares")  # as in the sets of referring expressions that LLaVA was trained on

    def __init__(self, hf: ProcessorMixin, config: LlavaConfig) -> None:
        super().__init__(hf, find_markers(partial(hf.apply_chat_template, tokenize=False), hf.tokenizer))
        self.config = config
        self.tiling = config.tiling
        if not config.has_video:
            self.modalities = ("text", "image")

    @cached_property
    def token_ids(self) -> dict[str, int]:
        """Config key -> id of the placeholders."""
        ids = {"image_token_index": self.hf.image_token_id}
        return ids | ({"video_token_index": self.hf.video_token_id} if self.config.has_video else {})

    @cached_property
    def media_ids(self) -> frozenset[int]:
        """Ids of the placeholders."""
        return frozenset(self.token_ids.values())

    def messages(self, row: Row) -> list[JsonObject]:
        """Contents as lists of parts, which the published templates want even of plain text."""
        return [
            message
            if isinstance(message["content"], list)
            else {**message, "content": [{"type": "text", "text": message["content"]}]}
            for message in super().messages(row)
        ]

    def call_options(self, row: Row, media: LoadedMedia) -> JsonObject:
        """For OneVision: all images as one sample's, of which it cuts one that is alone; videos of unequal length apart."""
        options: JsonObject = {}
        if self.config.has_video and row.images:
            options["images"] = [media.arguments["images"]]
        if row.videos:
            options["videos_kwargs"] = {"do_sample_frames": False}  # which were taken as the run says
        if len({len(video) for video in media.arguments.get("videos", ())}) > 1:
            options["return_tensors"] = None
        return options

    def media_tensors(self, features: JsonMapping) -> dict[str, Tensor]:
        """The tower's tensors, without the tiles that transformers fills up with; see the module's docstring."""
        tensors = {}
        if "pixel_values" in features:
            sizes = self._sizes(features)
            tiles = features["pixel_values"] if self.config.lines else features["pixel_values"][:, None]
            tensors["pixel_values"] = torch.cat(
                [as_tensor(t[:n], torch.float32) for t, (*_, n) in zip(tiles, sizes, strict=True)]
            )
            tensors["image_tiles"] = torch.tensor(sizes)
        if "pixel_values_videos" in features:
            videos = list(features["pixel_values_videos"])
            tensors["pixel_values_videos"] = torch.cat([as_tensor(video, torch.float32) for video in videos])
            tensors["video_ends"] = torch.tensor([int(n == len(v)) for v in videos for n in range(1, len(v) + 1)])
        return tensors

    def _sizes(self, features: JsonMapping) -> list[tuple[int, int, int]]:
        """Height, width and tiles of each image; OneVision cuts those that are alone in their sample."""
        if not self.config.lines:
            return [(self.tiling.tile, self.tiling.tile, 1)] * len(features["pixel_values"])
        sizes = [(int(height), int(width)) for height, width in features["image_sizes"]]
        together = [int(count) for count in features.get("batch_num_images", [1] * len(sizes))]
        alone = [count == 1 for count in together for _ in range(count)]
        return [(*size, self.tiling.tiles(*size) if cut else 1) for size, cut in zip(sizes, alone, strict=True)]

    def expected_tokens(self, media: Mapping[str, Tensor]) -> dict[str, int]:
        """Placeholder tokens that images and videos give."""
        sizes = media["image_tiles"].tolist() if "image_tiles" in media else []
        counts = {self.hf.image_token: sum(self.tiling.image_tokens(*size) for size in sizes)}
        if self.config.has_video:
            ends = media["video_ends"].tolist() if "video_ends" in media else []
            counts[self.hf.video_token] = sum(self.tiling.frame_tokens(last) for last in ends)
        return counts

    def tower_rows(self, media: Mapping[str, Tensor]) -> dict[str, list[int]]:
        """Tiles, one by one."""
        tiles = sum(len(media[name]) for name in ("pixel_values", "pixel_values_videos") if name in media)
        return {"vision": [1] * tiles}

    def sketch(self, row: Row, text: str, headers: Headers, pixels: PixelLimits) -> Sketch:
        """The template's text, a token for each medium."""
        tiling, lines = self.tiling, self.config.lines
        cut = lines and (len(headers.images) == 1 or not self.config.has_video)
        sizes = [(*size, tiling.tiles(*size) if cut else 1) for size in headers.images]
        tokens = sum(tiling.image_tokens(*size) for size in sizes)
        tokens += sum(count * tiling.frame_tokens(0) + 1 for count, *_ in headers.videos)
        tiles = sum(tiles for *_, tiles in sizes) + sum(count for count, *_ in headers.videos)
        further = tokens - len(headers.images) - len(headers.videos)
        return Sketch(text, further, {"vision": [1] * tiles})


def build_processor(arch_config: PretrainedConfig, source: str | None = None) -> LlavaProcessor:
    """The processor of a run, of a folder or around the bundled tokenizer (`ModelFamily.processor`); ConfigError where they don't fit."""
    arch = arch_config if isinstance(arch_config, dict) else arch_config.to_dict()
    config = LlavaConfig.from_arch(arch)
    hf = _make(config) if source is None else load_processor(source, KINDS[config.hf.model_type], {})
    _fit(hf, config, source)
    return LlavaProcessor(hf, config)


def find_markers(render: Callable[..., str], tokenizer: PreTrainedTokenizerBase) -> ChatMarkers:
    """How a chat template writes an answer, read off an example.

    Headers that begin with a special token are found among the tokens; others are left empty. An answer that no special
    token ends gets the tokenizer's end of sequence.
    """
    turns = (("user", "Why?"), ("assistant", "Therefore."))
    text = render([{"role": role, "content": [{"type": "text", "text": text_of_turn}]} for role, text_of_turn in turns])
    between, _, behind = text.partition("Why?")[2].partition("Therefore.")
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    opens = max((between.rfind(token) for token in special), default=-1)
    ends = [token for token in special if behind.lstrip().startswith(token)]
    end = ends[0] if ends else tokenizer.eos_token or ""
    return ChatMarkers(header=between[opens:] if opens >= 0 else "", end=end)


def _fit(hf: ProcessorMixin, config: LlavaConfig, source: str | None) -> None:
    """Give the processor what it needs of the architecture, which older folders leave out, and a chat template."""
    tiling, images = config.tiling, hf.image_processor
    size = dict(images.crop_size or images.size)
    pixels = {value for value in size.values() if value}
    if pixels != {tiling.tile}:
        raise ConfigError(
            f"model.init: the image processor of {source} gives images of {size}, but vision_config.image_size is "
            f"{tiling.tile}; correct its preprocessor_config.json"
        )
    hf.vision_feature_select_strategy = config.hf.vision_feature_select_strategy
    if config.lines:
        images.image_grid_pinpoints = [list(pair) for pair in tiling.pinpoints]
    if config.has_video:
        hf.num_image_tokens = tiling.tile_tokens + config.drops_first  # of the tower
        hf.vision_aspect_ratio = config.hf.vision_aspect_ratio
    else:
        hf.patch_size = config.vision.patch_size
        hf.num_additional_image_tokens = int(config.vision.model_type == "clip_vision_model")
    if not hf.chat_template:
        hf.chat_template = hf.tokenizer.chat_template or VICUNA


def _make(config: LlavaConfig) -> ProcessorMixin:
    """A processor of the bundled tokenizer, for the architecture's tiles."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY_TOKENIZER)
    kind = KINDS[config.hf.model_type].removesuffix("Processor")
    tile = config.tiling.tile
    square = {"height": tile, "width": tile}
    plain: JsonObject = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    parts: JsonObject = {"tokenizer": tokenizer, "chat_template": tokenizer.chat_template}
    if config.has_video:
        plain |= {"size": square}
        parts["video_processor"] = transformers.LlavaOnevisionVideoProcessor(**plain)
    else:
        plain |= {"size": {"shortest_edge": tile}, "crop_size": square}
        plain |= {} if config.lines else {"do_pad": True}  # nothing is cropped
    parts["image_processor"] = getattr(transformers, f"{kind}ImageProcessor")(**plain)
    return getattr(transformers, f"{kind}Processor")(**parts)
