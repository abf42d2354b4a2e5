"""InternVL's processor: images in tiles of one size, videos as frames of one tile each behind their numbers.

Media tensors of a sample (each joined along dim 0 over samples): pixel_values (N, 3, S, S) float32, the tiles of its
images and the frames of its videos in the order of the text, a picture of the whole image behind its tiles where these
are several; num_tiles (1,) int64, the N.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo.config.entries import PixelLimits
from zoo.data.media.media_files import LoadedMedia
from zoo.data.media.sizes import Headers
from zoo.data.processors.fitting import Sketch
from zoo.data.processors.processor import Processor, as_tensor
from zoo.data.processors.vision import MARKERS, load_processor
from zoo.data.sources.rows import Row
from zoo.data.tokenizer import ROOT as TINY_TOKENIZER
from zoo.errors import ConfigError
from zoo.models.internvl.config import InternVLConfig
from zoo.types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from transformers import PretrainedConfig, ProcessorMixin

# What the published tokenizers name their tokens, and those of the bundled tokenizer.
TOKENS = {
    "start_image_token": "<|vision_start|>",
    "end_image_token": "<|vision_end|>",
    "context_image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
}


class InternVLProcessor(Processor):
    """`Processor` around transformers' InternVLProcessor: text, images, videos."""

    modalities = ("text", "image", "video")

    def __init__(self, hf: ProcessorMixin) -> None:
        super().__init__(hf, MARKERS)

    @cached_property
    def token_ids(self) -> dict[str, int]:
        """Config key -> id of the placeholder of images and frames."""
        return {"image_token_id": self.hf.image_token_id}

    @cached_property
    def media_ids(self) -> frozenset[int]:
        """Ids of the placeholder and of the tokens around it."""
        return frozenset(self.hf.image_token_ids)

    @cached_property
    def placeholders_of_servers(self) -> dict[int, int]:
        """vLLM has the placeholder of videos in frames, where transformers' processor has that of images."""
        return {self.tokenizer.convert_tokens_to_ids(self.hf.video_token): self.hf.image_token_id}

    def call_options(self, row: Row, media: LoadedMedia) -> JsonObject:
        """Frames are taken as they are."""
        return {"videos_kwargs": {"do_sample_frames": False}} if row.videos else {}

    def call_hf(self, text: str, arguments: JsonMapping) -> JsonMapping:
        """As transformers' processor, which takes videos of one length in a text: others go in one by one."""
        if len({len(video) for video in arguments.get("videos", ())}) > 1:
            return one_by_one(self.hf, text, arguments)
        return super().call_hf(text, arguments)

    def media_tensors(self, features: JsonMapping) -> dict[str, Tensor]:
        """The tower's tensors; see the module's docstring."""
        if "pixel_values" not in features:
            return {}
        tiles = as_tensor(features["pixel_values"], torch.float32)
        return {"pixel_values": tiles, "num_tiles": torch.tensor([len(tiles)])}

    def expected_tokens(self, media: Mapping[str, Tensor]) -> dict[str, int]:
        """Placeholder tokens that tiles give."""
        return {self.hf.image_token: len(media.get("pixel_values", ())) * self.hf.image_seq_length}

    def tower_rows(self, media: Mapping[str, Tensor]) -> dict[str, list[int]]:
        """Rows that the vision tower takes at a time: each tile is one row."""
        return {"vision": [1] * len(media.get("pixel_values", ()))}

    def sketch(self, row: Row, text: str, headers: Headers, pixels: PixelLimits) -> Sketch:
        """What transformers' processor makes of the template's text, with a placeholder for each tile."""
        hf = self.hf
        images, videos = iter(headers.images), iter(headers.videos)

        def written(match: re.Match[str]) -> str:
            if match.lastgroup == "image":
                tiles = hf.image_processor.get_number_of_image_patches(*next(images), {"crop_to_patches": True})
                return str(hf.replace_image_token({"num_patches": [tiles]}, 0))
            frames = torch.empty(1, next(videos)[0])
            return str(hf.replace_video_token({"pixel_values_videos": frames}, 0))

        whole = hf.multimodal_pattern.sub(written, text)
        short = whole.replace(hf.image_token * hf.image_seq_length, hf.image_token)
        tiles = short.count(hf.image_token)
        return Sketch(short, tiles * (hf.image_seq_length - 1), {"vision": [1] * tiles})


def one_by_one(hf: ProcessorMixin, text: str, arguments: JsonMapping) -> dict[str, Tensor]:
    """What transformers' processor makes of a text cut behind each placeholder, put together again.

    A medium ends with a token of its own, so the pieces have the tokens of the whole.
    """
    media = {f"{kind}s": iter(arguments.get(f"{kind}s", ())) for kind in ("image", "video")}
    options = {name: value for name, value in arguments.items() if name not in media}
    pieces, begin = [], 0
    for match in hf.multimodal_pattern.finditer(text):
        kind = f"{match.lastgroup}s"
        pieces.append(hf(text=text[begin : match.end()], **{kind: [next(media[kind])]}, **options))
        begin = match.end()
    if text[begin:]:
        pieces.append(hf(text=text[begin:], **options))
    return {
        name: torch.cat([piece[name] for piece in pieces if name in piece], dim=dim)
        for name, dim in (("input_ids", 1), ("attention_mask", 1), ("pixel_values", 0))
    }


def build_processor(arch_config: PretrainedConfig, source: str | None = None) -> InternVLProcessor:
    """The processor of a run, of a folder or around the bundled tokenizer (`ModelFamily.processor`); ConfigError where they don't fit."""
    arch = arch_config if isinstance(arch_config, dict) else arch_config.to_dict()
    config = InternVLConfig.from_arch(arch)
    if source is None:
        return InternVLProcessor(_make(config))
    hf = load_processor(source, "InternVLProcessor", {})
    for name, size in (("image", hf.image_processor.size), ("video", hf.video_processor.size)):
        if {size["height"], size["width"]} != {config.tile}:
            raise ConfigError(
                f"model.init: the {name} processor of {source} gives pictures of {dict(size)}, but vision_config.image_size "
                f"is {config.tile}; correct its preprocessor_config.json"
            )
    if hf.image_seq_length != config.tile_tokens:
        raise ConfigError(
            f"model.init: image_seq_length of {source} is {hf.image_seq_length}, but a tile of the architecture has "
            f"{config.tile_tokens} embeddings; correct its processor_config.json"
        )
    return InternVLProcessor(hf)


def _make(config: InternVLConfig) -> ProcessorMixin:
    """A processor of the bundled tokenizer, for the architecture's tiles."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY_TOKENIZER, extra_special_tokens=TOKENS)
    around = (TOKENS["start_image_token"], TOKENS["end_image_token"])
    template = tokenizer.chat_template
    for token in around:  # which the processor writes itself
        template = template.replace(token, "")
    square = {"height": config.tile, "width": config.tile}
    plain = {"size": square, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return transformers.InternVLProcessor(
        image_processor=transformers.GotOcr2ImageProcessor(**plain),
        video_processor=transformers.InternVLVideoProcessor(**plain, do_sample_frames=False),
        tokenizer=tokenizer,
        image_seq_length=config.tile_tokens,
        chat_template=template,
    )
