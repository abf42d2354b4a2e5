"""An export's processor makes of media and chats in transformers what the run made of them, without being told anything."""

import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer
from transformers.video_utils import VideoMetadata

import zoo
from zoo.config.compose import about
from zoo.config.entries import MediaLimits
from zoo.config.locate import Place
from zoo.data.processors.text import TextProcessor
from zoo.data.sources.references import Access
from zoo.data.sources.rows import make_row
from zoo.errors import ConfigError
from zoo.model.run_settings import FILE, settings_of, settings_of_recipe
from zoo.model.served_processor import ServedProcessor
from zoo.registry import get_family

RATE = 8  # frames a second of the clip
# Recipe -> frames a second at which transformers takes the same frames as zoo; None: its videos are another matter.
FAMILIES = {
    "qwen3_vl_sft": 8.0, "qwen25_vl_sft": 4.0, "glm45v_sft": 4.0, "internvl_sft": 4.0, "llava_onevision_sft": 4.0,
    "qwen3_omni_sft": None, "qwen25_omni_sft": None, "gemma4_sft": None, "llava_sft": None,
}  # fmt: skip


def made(name: str, *overrides: str) -> tuple[Any, Any]:
    """The tiny processor of a recipe, and the recipe."""
    size = about(name)["tiny_size"] or "tiny"
    recipe = zoo.load_recipe(name, [f"size={size}", *overrides])
    family = get_family(recipe.model.family)
    config = family.load("config").from_arch(recipe.model.arch)
    return family.load("processor")(config.hf, None), recipe


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media")
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 255, (200, 300, 3), dtype=np.uint8)).save(folder / "a.png")
    with av.open(str(folder / "a.mp4"), "w") as container:
        stream = container.add_stream("libx264rgb", rate=RATE, options={"qp": "0"})
        stream.width, stream.height, stream.pix_fmt = 96, 64, "rgb24"
        for _ in range(2 * RATE):
            pixels = rng.integers(0, 255, (64, 96, 3), dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return folder


def by_zoo(processor: Any, recipe: Any, folder: Path, kind: str) -> tuple[list[int], torch.Tensor]:
    turns = [{"role": "user", "content": f"<{kind}>what?"}, {"role": "assistant", "content": "x"}]
    name = "a.png" if kind == "image" else "a.mp4"
    row = make_row({"messages": turns, f"{kind}s": [name]}, "x:1", Access(folder))
    limits = MediaLimits.from_data(recipe.data)
    _, features = processor.encode_both(
        row, video_fps=limits.video_fps, max_frames=limits.max_frames, pixels=limits.pixels
    )
    return features["input_ids"][0].tolist(), pixels_of(features)


def by_transformers(processor: Any, folder: Path, kind: str) -> tuple[list[int], torch.Tensor]:
    said = [{"type": kind}, {"type": "text", "text": "what?"}]
    chat = [{"role": "user", "content": said}, {"role": "assistant", "content": [{"type": "text", "text": "x"}]}]
    text = processor.apply_chat_template(chat, tokenize=False)
    if kind == "image":
        given: dict[str, Any] = {"images": [Image.open(folder / "a.png")]}
    else:
        with av.open(str(folder / "a.mp4")) as container:
            frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
        clock = VideoMetadata(total_num_frames=len(frames), fps=RATE, duration=len(frames) / RATE)
        given = {"videos": [torch.from_numpy(frames).permute(0, 3, 1, 2)], "video_metadata": [clock]}
    features = processor(text=[text], return_tensors="pt", **given)
    return features["input_ids"][0].tolist(), pixels_of(features)


def pixels_of(features: Any) -> torch.Tensor:
    found = next(features[name] for name in ("pixel_values", "pixel_values_videos") if name in features)
    return torch.as_tensor(np.asarray(found[0] if isinstance(found, list) else found)).float().squeeze()


@pytest.mark.parametrize("name", FAMILIES)
def test_media_are_read_as_the_run_read_them(name: str, media: Path, tmp_path: Path) -> None:
    fps = FAMILIES[name]
    processor, recipe = made(name)
    if processor.pixels_of_token:
        recipe = recipe.replace({"data.max_pixels": 16384})
    if fps is not None:
        recipe = recipe.replace({"data.video_fps": fps})
    before = processor.hf.to_json_string()
    ServedProcessor(processor, settings_of_recipe(recipe)).save_pretrained(tmp_path)
    assert processor.hf.to_json_string() == before, "the run's own processor stays as it is"
    served = AutoProcessor.from_pretrained(tmp_path)
    for kind in ("image", "video") if fps is not None else ("image",):
        (ids, pixels), (wanted, theirs) = (by_zoo(processor, recipe, media, kind), by_transformers(served, media, kind))
        assert ids[: len(wanted)] == wanted and len(ids) - len(wanted) <= 1, kind  # GLM's last end is zoo's
        torch.testing.assert_close(pixels, theirs, rtol=0, atol=0, msg=f"{kind}: {{}}".format)


@pytest.mark.parametrize("name", ["qwen3_omni_sft", "qwen25_omni_sft"])
def test_a_thinker_that_has_no_limits_of_videos_gets_none(name: str, tmp_path: Path) -> None:
    """Where its video processor repeats the limits of images, its class's are used, and go on being used."""
    processor, recipe = made(name)
    processor.hf.video_processor.size = processor.hf.image_processor.size
    processor.video_size = None  # as of a folder without a file for videos
    ServedProcessor(processor, settings_of_recipe(recipe.replace({"data.max_pixels": 4096}))).save_pretrained(tmp_path)
    served = AutoProcessor.from_pretrained(tmp_path)
    assert served.image_processor.size["longest_edge"] == served.video_processor.size["longest_edge"] == 4096


def test_files_of_the_source_say_the_same(tmp_path: Path) -> None:
    """They lie beside the processor's own, which earlier transformers and vLLM don't read."""
    processor, recipe = made("qwen25_vl_sft", "data.max_pixels=4096", "data.video_fps=1", "data.max_frames=9")
    older = {"min_pixels": 1, "max_pixels": 10**6, "patch_size": 14}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(older))
    (tmp_path / "video_preprocessor_config.json").write_text("{}")
    ServedProcessor(processor, settings_of_recipe(recipe)).save_pretrained(tmp_path)
    images = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert (images["max_pixels"], images["size"]["longest_edge"], images["patch_size"]) == (4096, 4096, 14)
    videos = json.loads((tmp_path / "video_preprocessor_config.json").read_text())
    assert (videos["fps"], videos["max_frames"], videos["do_sample_frames"]) == (1.0, 9, True)


def test_a_run_that_chose_no_frames_leaves_the_choice_as_it_is(tmp_path: Path) -> None:
    processor, recipe = made("qwen25_vl_sft")
    ServedProcessor(processor, settings_of_recipe(recipe)).save_pretrained(tmp_path)
    assert not AutoProcessor.from_pretrained(tmp_path).video_processor.do_sample_frames


VALUES = [False, True, 3, 0.5, None, "low", 'a "quoted" \\ {{ x }}\nüñ🙂', ["a", 1], {"k": [True, None]}]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_arguments_of_the_template_are_its_defaults(value: Any, tmp_path: Path) -> None:
    processor = TextProcessor.build({})
    processor.tokenizer.chat_template = (
        "{% macro told() %}{{ mode | tojson }}{% endmacro %}\n{{ told() }}{{ messages[0].content }}"
    )
    recipe = zoo.Recipe().replace({"data.template": {"mode": value}})
    (tmp_path / "chat_template.json").write_text('{"chat_template": "of the source"}')
    ServedProcessor(processor, settings_of_recipe(recipe)).save_pretrained(tmp_path)
    served = AutoTokenizer.from_pretrained(tmp_path)
    chat = [{"role": "user", "content": "Hi."}]
    for more in ({}, {"mode": "given"}):
        wanted = processor.tokenizer.apply_chat_template(chat, tokenize=False, **({"mode": value} | more))
        assert served.apply_chat_template(chat, tokenize=False, **more) == wanted
    assert json.loads((tmp_path / "chat_template.json").read_text())["chat_template"] == served.chat_template


def test_thinking_is_off_where_the_run_had_it_off(tmp_path: Path) -> None:
    processor = TextProcessor.build({})
    processor.tokenizer.chat_template += (
        "{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false -%}"
        "{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}"
    )  # as Qwen3's ends
    recipe = zoo.Recipe().replace({"data.template": {"enable_thinking": False}})
    ServedProcessor(processor, settings_of_recipe(recipe)).save_pretrained(tmp_path)
    served = AutoTokenizer.from_pretrained(tmp_path)
    chat = [{"role": "user", "content": "Hi."}]
    asked = {"tokenize": False, "add_generation_prompt": True}
    assert served.apply_chat_template(chat, **asked).endswith("<think>\n\n</think>\n\n")
    assert not served.apply_chat_template(chat, enable_thinking=True, **asked).endswith("</think>\n\n")


def test_an_export_says_how_rows_were_read_and_names_no_path(tmp_path: Path) -> None:
    processor = TextProcessor.build({})
    entry = {"path": "/secret/rows.jsonl", "columns": {"messages": "chat"}, "max_pixels": 77}
    changes = {"data.train": [entry], "data.root": "/secret", "data.labels": "last", "data.urls": True}
    ServedProcessor(processor, settings_of_recipe(zoo.Recipe().replace(changes))).save_pretrained(tmp_path)
    assert "secret" not in (tmp_path / FILE).read_text()
    found = settings_of(Place("hf", tmp_path, tmp_path))
    assert (found.values["data.labels"], found.values["data.max_pixels"]) == ("last", 77)
    assert found.form == {"columns": {"messages": "chat"}} and "data.urls" not in found.values


@pytest.mark.parametrize(
    "text",
    [
        "[]", "{}", '{"settings": {}, "rows": {"format": "os:system"}}', '{"settings": {"packing.budget": "x"}, "rows": {}}',
        '{"settings": {}, "rows": {"columns": 3}}',
    ],
)  # fmt: skip
def test_what_a_stranger_wrote_in_its_place_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ConfigError):
        settings_of(Place("hf", tmp_path, tmp_path))


def test_a_stranger_s_folder_opens_nothing_here(tmp_path: Path) -> None:
    settings = {"data.urls": True, "data.root": "/", "data.outside_root": True, "train.lr": 1, "data.labels": "all"}
    (tmp_path / FILE).write_text(json.dumps({"settings": settings, "rows": {}}))
    assert settings_of(Place("hf", tmp_path, tmp_path)).values == {"data.labels": "all"}


def test_a_server_may_have_another_placeholder_in_the_frames_of_internvl() -> None:
    processor, _ = made("internvl_sft")
    image, video = processor.tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|video_pad|>"])
    assert processor.placeholders_of_servers == {video: image} and image != video
    assert made("qwen3_vl_sft")[0].placeholders_of_servers == {}, "its positions depend on the placeholder"
