"""What processors of sound share: media tensors and lengths of clips, and thinkers' processors, which take all media.

Media tensors of a sample (each joined along dim 0 over samples): input_features (frames, mel) float32, padding removed, and
feature_lens (n,) int64, mel frames of each clip. Thinkers have those of `zoo.data.processors.vision` beside them, and
video_second_per_grid (n,) float32, seconds of a temporal patch.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from zoo.config.entries import MediaLimits, PixelLimits
from zoo.config.schema import DataConfig
from zoo.data.errors import RowError
from zoo.data.media.codes import SpeechCodes, count_frames, find_codec, with_codes
from zoo.data.media.decoding_workers import decoder_for
from zoo.data.media.media_files import LoadedMedia
from zoo.data.media.sizes import Headers, SampleSize
from zoo.data.processors import vision
from zoo.data.processors.fitting import Sketch
from zoo.data.processors.processor import ArchConfig, CallArguments, Features, as_tensor
from zoo.data.sample import Sample
from zoo.data.sources.rows import Row
from zoo.errors import ConfigError
from zoo.packing.cost import TALKER
from zoo.packing.spoken import COUNTS
from zoo.types import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

# Config key -> attribute of a thinker's tokenizer that holds the token (tokenizer_config.json of the published checkpoints).
TOKENS = {
    "image_token_id": "image_token",
    "video_token_id": "video_token",
    "audio_token_id": "audio_token",
    "vision_start_token_id": "vision_bos_token",
    "vision_end_token_id": "vision_eos_token",
    "audio_start_token_id": "audio_bos_token",
    "audio_end_token_id": "audio_eos_token",
}
# Least and most tokens of a video's frame, for the processor without published files.
TINY_FRAME_TOKENS = (1, 256)
CHUNK_TOKENS = 13  # of a full chunk, a number in `_get_feat_extract_output_lengths` of transformers' encoders


def check_window(n_window: int, tokens: int) -> None:
    """ConfigError where `tokens`, those of a chunk of 2 * n_window frames, are not what transformers counts."""
    if tokens != CHUNK_TOKENS:
        counted = f"transformers counts {CHUNK_TOKENS} tokens for each full audio chunk"
        configured = f"chunks of {2 * n_window} frames give {tokens}"
        raise ConfigError(f"audio_config.n_window is {n_window}: {counted}, but {configured}; use 50.")


def audio_tensors(features: Features, mask: str) -> dict[str, Tensor]:
    """The audio tower's tensors out of a Hugging Face processor's result, in which `mask` names that of the frames."""
    if "input_features" not in features:
        return {}
    mel = as_tensor(features["input_features"], torch.float32)  # (n, mel, longest)
    real = as_tensor(features[mask], torch.bool)  # (n, longest)
    lengths = real.sum(-1)
    if not lengths.all():
        raise RowError("", "corrupt_media", f"sound {int(lengths.argmin())} of the row is under 10 ms long.")
    return {"input_features": mel.transpose(1, 2)[real], "feature_lens": lengths}


def mel_frames(samples: Sequence[int], hop: int, least: int = 0) -> list[int]:
    """Mel frames of a row's sounds with so many samples, those under `least` made as long.

    The longest is cut to whole frames of `hop` samples, as in transformers' feature extractors.
    """
    samples = [max(count, least) for count in samples]
    most = max(samples, default=0) // hop
    return [min(-(-count // hop), most) for count in samples]


def token_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The token ids that a thinker's config needs."""
    return {key: tokenizer.convert_tokens_to_ids(getattr(tokenizer, name)) for key, name in TOKENS.items()}


def usual_video_size(hf: ProcessorMixin) -> Mapping[str, int]:
    """The limits of a video's pixels that a thinker's processor puts in its calls by default."""
    if takes_sound_apart(hf):
        return hf.videos_kwargs["size"]
    return hf.valid_processor_kwargs._defaults["videos_kwargs"]["size"]


def takes_sound_apart(hf: ProcessorMixin) -> bool:
    """Whether a thinker's processor has `load_audio_from_video` and the clock among its own arguments (transformers >= 5.23).

    Before, they were keys of `videos_kwargs`, the former as `use_audio_in_video`.
    """
    return hasattr(hf, "load_audio_from_video")


class OmniProcessor(vision.PatchProcessor):
    """`Processor` around that of a thinker in transformers: text, images, videos, sound, and videos with their sound.

    Args:
        hf: transformers' processor.
        audio_tokens: tokens of a clip of so many mel frames.
        clock: further arguments of its call for videos, which order sound among frames.
    """

    modalities = ("text", "image", "video", "audio")

    def __init__(self, hf: ProcessorMixin, audio_tokens: Callable[[int], int], clock: Mapping[str, float]) -> None:
        super().__init__(hf, token_ids(hf.tokenizer))
        self.audio_tokens = audio_tokens
        self.clock = dict(clock)
        # Pixel limits of a frame, where the folder has some meant for videos. The call puts its class's default (128 to 768
        # tokens a frame) over what its video processor was saved with, and published folders, which have no file for videos,
        # have the images' limits there: the default is right for them.
        size, images = dict(hf.video_processor.size), dict(hf.image_processor.size)
        is_own = size != images
        self.video_size = {name: size[name] for name in ("shortest_edge", "longest_edge")} if is_own else None
        self.frame_size = self.video_size or usual_video_size(hf)

    @staticmethod
    def load(thinker: ArchConfig, source: str | None, kind: str) -> ProcessorMixin:
        """transformers' processor of class `kind` for a thinker's config, of a folder or around the bundled tokenizer.

        Raises ConfigError as `vision.load_processor` does.
        """
        geometry = vision.vision_geometry(vision.config_field(thinker, "vision_config"))
        mel_bins = vision.config_field(vision.config_field(thinker, "audio_config"), "num_mel_bins")
        if source is not None:
            wanted = vision.wanted_geometry(geometry) | {"feature_extractor.feature_size": mel_bins}
            return vision.load_processor(source, kind, wanted)
        import transformers

        # cap_pixels_per_frame False is what the published processors do today (without a warning that it may change).
        video = transformers.Qwen2VLVideoProcessor(
            do_sample_frames=False, cap_pixels_per_frame=False, **vision.tiny_settings(geometry, TINY_FRAME_TOKENS)
        )
        hears = transformers.WhisperFeatureExtractor(feature_size=mel_bins, return_attention_mask=True)
        parts = vision.tiny_parts(geometry)
        return getattr(transformers, kind)(video_processor=video, feature_extractor=hears, **parts)

    def call_options(self, row: Row, media: LoadedMedia) -> CallArguments:
        """Arguments of the HF call that must agree with the architecture and with how the frames were taken.

        `fps` and `use_audio_in_video` are lists, one for each video, where these differ; `call_hf` takes such a row apart.
        """
        options: CallArguments = {}
        if row.videos:
            rates = [pace.fps for pace in media.paces]
            heard = [row.use_audio_in_video and number not in media.silent for number in range(len(row.videos))]
            apart = len(set(rates)) > 1 or len(set(heard)) > 1
            options["videos_kwargs"] = {
                "fps": rates if apart else rates[0],
                "do_sample_frames": False,
                "use_audio_in_video": heard if apart else heard[0],
                **self.clock,
            }
            if self.video_size is not None:
                options["videos_kwargs"]["size"] = dict(self.video_size)
        if "audio" in media.arguments:
            options["audio_kwargs"] = self.audio_options(media.arguments["audio"])
        return options

    def stored_limits(self, pixels: PixelLimits) -> dict[str, CallArguments]:
        """Sizes of images and of videos; where videos have none of their own, they go on repeating that of images."""
        limits = self.pixel_options(pixels)
        if self.video_size is None and "images_kwargs" in limits:
            limits = {"videos_kwargs": limits["images_kwargs"], **limits}
        return limits

    def options_of_servers(self, limits: MediaLimits) -> CallArguments:
        """The rate of frames, which times them, and the size of videos, over which the call puts its class's default."""
        call: CallArguments = {"fps": limits.video_fps} | ({"size": self.video_size} if self.video_size else {})
        return {"videos_kwargs": call | self.pixel_options(limits.pixels).get("videos_kwargs", {})}

    def call_hf(self, text: str, arguments: Mapping[str, Any]) -> Features:
        """As transformers' processor, which takes one rate for all videos of a call, and hears all of them or none.

        Else it gets the text cut behind its media: each ends with a token of its own, so the pieces have the tokens of the whole.
        """
        if not isinstance(arguments.get("videos_kwargs", {}).get("fps"), list):
            return super().call_hf(text, self._own_arguments(text, arguments))
        pieces = [self.hf(**self._own_arguments(piece["text"], piece)) for piece in self._pieces(text, arguments)]
        features: dict[str, Tensor] = {}
        for name in dict.fromkeys(name for piece in pieces for name in piece):
            parts = [torch.as_tensor(piece[name]) for piece in pieces if name in piece]
            if name in ("input_features", "feature_attention_mask"):  # (n, mel, frames) and (n, frames)
                longest = max(part.shape[-1] for part in parts)
                parts = [torch.nn.functional.pad(part, (0, longest - part.shape[-1])) for part in parts]
            features[name] = torch.cat(parts, dim=int(name in ("input_ids", "attention_mask")))
        return features

    def _own_arguments(self, text: str, arguments: Mapping[str, Any]) -> CallArguments:
        """Arguments as the installed transformers names them: some of videos and sound may be the processor's own."""
        own = dict(arguments)
        processor_names = self.hf.valid_processor_kwargs.__annotations__.keys()
        for kind in ("videos_kwargs", "audio_kwargs"):
            if kind in own and takes_sound_apart(self.hf):
                of_kind = {name: value for name, value in own[kind].items() if name not in processor_names}
                own |= {name: own[kind][name] for name in own[kind].keys() - of_kind.keys()}
                if of_kind.pop("use_audio_in_video", False):
                    own |= {"load_audio_from_video": True, "audio_from_video_indices": self._heard_in(text)}
                own[kind] = of_kind
        return own

    def _heard_in(self, text: str) -> list[int | None]:
        """The number of its video for each sound of a text, None for a clip, in the order of the text; all videos are heard."""
        tokens, videos = self.hf.tokenizer, itertools.count()
        marks = re.findall(f"{re.escape(tokens.video_token)}|{re.escape(tokens.audio_token)}", text)
        return [next(videos) if mark == tokens.video_token else None for mark in marks]

    def _pieces(self, text: str, arguments: Mapping[str, Any]) -> Iterator[CallArguments]:
        """Arguments of a call for each piece of the text that ends with a medium, and for what is left."""
        tokens = self.hf.tokenizer
        kinds = {tokens.image_token: "images", tokens.video_token: "videos", tokens.audio_token: "audio"}
        ends = (tokens.vision_eos_token, tokens.audio_eos_token)
        marks, behind = ("|".join(map(re.escape, some)) for some in (kinds, ends))
        media = {kind: iter(arguments.get(kind, ())) for kind in kinds.values()}
        shared = {
            name: value for name, value in arguments.items() if name not in media and not name.endswith("_kwargs")
        }
        videos = arguments["videos_kwargs"]
        each = zip(videos["fps"], videos["use_audio_in_video"], strict=True)
        begin = 0
        for match in re.finditer(f"({marks})(?:{behind})?", text):
            kind = kinds[match[1]]
            piece: CallArguments = {**shared, "text": text[begin : match.end()], kind: [next(media[kind])]}
            if kind == "images" and "images_kwargs" in arguments:
                piece["images_kwargs"] = arguments["images_kwargs"]
            if kind == "videos":
                rate, is_heard = next(each)
                piece["videos_kwargs"] = {**videos, "fps": rate, "use_audio_in_video": is_heard}
                if is_heard:
                    piece["audio"] = [next(media["audio"])]
            if "audio" in piece:
                piece["audio_kwargs"] = self.audio_options(piece["audio"])
            yield piece
            begin = match.end()
        if text[begin:]:
            yield {**shared, "text": text[begin:]}

    def audio_options(self, sounds: Sequence[np.ndarray]) -> CallArguments:
        """Further arguments of the HF call for a row's sounds, each (samples,)."""
        return {}

    def media_tensors(self, features: Features) -> dict[str, Tensor]:
        """The towers' tensors by name; the module's docstring lists them."""
        media = vision.vision_tensors(features)
        if "video_second_per_grid" in features:
            media["video_second_per_grid"] = as_tensor(features["video_second_per_grid"], torch.float32)
        return media | audio_tensors(features, "feature_attention_mask")

    def model_inputs(self, row: Row, features: CallArguments) -> CallArguments:
        """The features, with what the thinker takes beside them."""
        if "video_second_per_grid" in features:
            features["video_second_per_grid"] = torch.as_tensor(features["video_second_per_grid"])
        return {**features, "use_audio_in_video": row.use_audio_in_video}

    def expected_tokens(self, media: Mapping[str, Tensor]) -> dict[str, int]:
        """Placeholder tokens that the towers' outputs replace."""
        frames = media["feature_lens"].tolist() if "feature_lens" in media else []
        heard = sum(self.audio_tokens(count) for count in frames)
        return vision.vision_tokens(self.hf, media) | {self.hf.audio_token: heard}

    def tower_rows(self, media: Mapping[str, Tensor]) -> dict[str, list[int]]:
        """Patches of each image and temporal patch, and mel frames of each clip."""
        frames = media["feature_lens"].tolist() if "feature_lens" in media else []
        return vision.vision_rows(media) | {"audio": frames}

    def sketch(self, row: Row, text: str, headers: Headers, pixels: PixelLimits) -> Sketch | None:
        """The template's text: a token for each medium, and two more around the sound of a video that is heard."""
        if headers.videos and self.hf.video_processor.cap_pixels_per_frame:
            return None
        grids = [*self.image_grids(headers, pixels), *self.video_grids(headers, pixels)]
        frames = self.mel_frames(headers.sounds)
        heard = [self.audio_tokens(count) for count in frames]
        merged = self.hf.image_processor.merge_size**2
        tokens = sum(time * height * width // merged for time, height, width in grids) + sum(heard)
        tracks = len(row.videos) if row.use_audio_in_video else 0
        further = tokens - len(grids) - (len(heard) - tracks) + 2 * tracks
        return Sketch(text, further, {"vision": vision.grid_rows(grids), "audio": frames})

    def incomparable(self, sample: Sample) -> str | None:
        """Videos of which some are heard: transformers' model takes all as heard, or none."""
        is_video = sample.input_ids[:-1] == self.token_ids["vision_start_token_id"]
        heard = int((is_video & (sample.input_ids[1:] == self.token_ids["audio_start_token_id"])).sum())
        if "video_grid_thw" in sample.media and 0 < heard < len(sample.media["video_grid_thw"]):
            return "silent videos beside videos with sound, which transformers' model does not tell apart"
        return None

    def mel_frames(self, samples: Sequence[int]) -> list[int]:
        """Mel frames of a row's sounds with so many samples."""
        return mel_frames(samples, self.hf.feature_extractor.hop_length)


class SpeakingProcessor(OmniProcessor):
    """`Processor` around that of a thinker whose whole model may have a talker.

    Args:
        hf, audio_tokens, clock: as `OmniProcessor` has them.
        speech: gives what the talker reads and says, where it is trained; None: there is none.

    Attributes:
        speech: what it gave.
        speaks: whether rows are spoken.
    """

    def __init__(
        self,
        hf: ProcessorMixin,
        audio_tokens: Callable[[int], int],
        clock: Mapping[str, float],
        speech: Callable[[], SpeechCodes] | None = None,
    ) -> None:
        super().__init__(hf, audio_tokens, clock)
        self._speech, self.speaks = speech, False
        self.speech: SpeechCodes | None = None
        self.codec: str | None = None

    def train_speech(self, codec: str | None = None) -> None:
        """Have every row spoken from here on, sound files by data.codec; ConfigError where the checkpoint has no talker, UserError for the codec."""
        if self._speech is None:
            raise ConfigError("train.speech_loss: the model has no talker; start from a checkpoint of the whole model.")
        self.speech, self.speaks, self.codec = self._speech(), True, codec
        if codec is not None:
            find_codec(codec)

    def measure(self, row: Row, **options: Any) -> SampleSize | None:
        """As every processor's, with the frames of a row that is spoken."""
        size = super().measure(row, **options)
        if size is None or self.speech is None or row.speech is None:
            return size
        frames = count_frames(row, self.speech.hertz, options.get("decoder") or decoder_for(DataConfig()))
        return None if frames is None else replace(size, media={**size.media, TALKER: [frames]})

    def tower_rows(self, media: Mapping[str, Tensor]) -> dict[str, list[int]]:
        """Those of the towers, and the talker's: frames of each sample."""
        spoken = {TALKER: media[COUNTS].tolist()} if COUNTS in media else {}
        return super().tower_rows(media) | spoken

    def encode_both(self, row: Row, **options: Any) -> tuple[Sample, JsonObject]:
        """As every processor's; where a talker is trained, RowError for codes, a speaker or an answer that it does not take as well."""
        sample, features = super().encode_both(row, **options)
        if not self.speaks:
            return sample, features
        assert self.speech is not None
        if self.codec is not None:
            row = with_codes(row, self.codec, self.speech.hertz, options.get("decoder") or decoder_for(DataConfig()))
        try:
            return self.speech.add(row, sample), features
        except ValueError as error:
            raise RowError(row.source, "speech", f"the row's speech can't be learnt: {error}.") from error
