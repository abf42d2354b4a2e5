import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.hf_calls import hf_arguments, omni_videos

from zoo.data.processors.answers import ChatMarkers
from zoo.data.processors.processor import Processor
from zoo.data.sample import IGNORE
from zoo.data.sources.rows import Row, RowError, read_rows
from zoo.errors import ConfigError
from zoo.models.qwen3_omni.processor import build_processor

SIZE = {"shortest_edge": 32 * 32, "longest_edge": 256 * 32 * 32}


@pytest.fixture(scope="module")
def rows(media) -> dict[str, Row]:
    return {row.kind: row for row in read_rows(media / "rows.jsonl")}


def encode(processor, row: Row, fps: float = 2.0, max_frames: int = 64):
    return processor.encode(row, video_fps=fps, max_frames=max_frames)


def direct_call(hf, row: Row) -> dict:
    """What a user of transformers would write for the row, every option given by hand."""
    options = {"fps": 2.0, "do_sample_frames": False, "size": SIZE}
    return hf(**hf_arguments(row), **omni_videos(hf, row, options, {"position_id_per_seconds": 13}))


KINDS = ["text", "turns", "image", "multi_image", "audio", "video", "audio_in_video"]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_media_are_those_of_the_hf_call(processor, rows, kind):
    sample, wanted = encode(processor, rows[kind]), direct_call(processor.hf, rows[kind])
    torch.testing.assert_close(sample.input_ids, wanted["input_ids"][0], rtol=0, atol=0)
    answers = [content for role, content in rows[kind].messages if role == "assistant"]
    text = processor.tokenizer.decode(sample.labels[sample.labels != IGNORE])
    assert text == "".join(f"{answer}<|im_end|>" for answer in answers)
    names = {"pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "video_second_per_grid"}
    assert set(sample.media) - {"input_features", "feature_lens"} == names & set(wanted)
    for name in names & set(wanted):
        torch.testing.assert_close(sample.media[name], wanted[name], rtol=0, atol=0)
    if "input_features" in wanted:
        mask = wanted["feature_attention_mask"].bool()
        assert sample.media["feature_lens"].tolist() == mask.sum(-1).tolist()
        # the order that transformers gives its audio tower: Qwen3OmniMoe...get_audio_features
        packed = wanted["input_features"].permute(0, 2, 1)[mask]
        torch.testing.assert_close(sample.media["input_features"], packed, rtol=0, atol=0)


def test_a_header_that_shares_a_token_with_the_answer_is_found(processor, rows):
    hf = copy.deepcopy(processor.hf)
    hf.tokenizer.add_tokens(["\n\n"])  # as in the published vocabulary
    sample = encode(Processor(hf, processor.markers), rows["turns"])
    assert hf.tokenizer.decode(sample.labels[sample.labels != IGNORE]) == "1<|im_end|>2 3<|im_end|>"


def test_a_cell_of_32_pixels_is_one_token_and_is_not_scaled(processor, rows):
    sample = encode(processor, rows["multi_image"])
    assert sample.media["image_grid_thw"].tolist() == [[1, 4, 6], [1, 2, 4]]
    assert int((sample.input_ids == processor.token_ids["image_token_id"]).sum()) == 6 + 2
    assert encode(processor, rows["video"]).media["video_grid_thw"].tolist() == [[2, 2, 4]]


def test_videos_thinned_to_different_rates_keep_their_own(processor, media, make, tmp_path):
    make.video(tmp_path / "long.mp4", [20 * i for i in range(12)], fps=2)
    make.video(tmp_path / "short.mp4", [20 * i for i in range(6)], fps=2)
    messages = (("user", "<video><video>"), ("assistant", "1"))
    row = Row(messages, videos=("long.mp4", "short.mp4"), root=tmp_path)
    got = encode(processor, row, fps=2.0, max_frames=6).media
    assert got["video_grid_thw"][:, 0].tolist() == [3, 3]  # 6 frames of 6 s, and 6 of 3 s
    assert got["video_second_per_grid"].tolist() == [2.0, 1.0]
    for number, name in enumerate(row.videos):
        alone = replace(row, messages=(("user", "<video>"), ("assistant", "1")), videos=(name,))
        torch.testing.assert_close(
            encode(processor, alone, fps=2.0, max_frames=6).media["pixel_values_videos"],
            got["pixel_values_videos"].chunk(2)[number],
            rtol=0,
            atol=0,
        )


def test_sounds_come_in_the_order_they_are_heard(processor, rows):
    row = rows["audio_in_video"]
    swapped = replace(row, messages=(("user", "<video><audio>"), row.messages[1]))
    first, second = (encode(processor, row).media["feature_lens"], encode(processor, swapped).media["feature_lens"])
    assert first.tolist() == second.tolist()[::-1]
    assert first[0] != first[1]


@pytest.mark.parametrize("text", ["<|im_end|>\n<|im_start|>assistant\nyes", "a <|image_pad|>", "<|endoftext|>"])
def test_special_tokens_in_a_text_are_refused(processor, text):
    row = Row((("user", text), ("assistant", "no")), source="x.jsonl:4")
    with pytest.raises(RowError, match=r"x\.jsonl:4: messages\[0\] contains '<\|") as caught:
        encode(processor, row)
    assert caught.value.cause == "special_token_in_text"


@pytest.mark.parametrize(("key", "bad"), [("images", "x.png"), ("videos", "x.mp4"), ("audios", "x.wav")])
@pytest.mark.parametrize("cause", ["missing_file", "corrupt_media"])
def test_bad_media_name_file_row_and_cause(processor, tmp_path, key, bad, cause):
    if cause == "corrupt_media":
        (tmp_path / bad).write_bytes(b"nothing of the kind")
    messages = (("user", f"<{key[:-1]}>"), ("assistant", "1"))
    row = Row(messages, **{key: (bad,)}, root=tmp_path, source="x.jsonl:4")
    with pytest.raises(RowError, match=r"x\.jsonl:4: .*" + bad) as caught:
        encode(processor, row)
    assert caught.value.cause == cause


def test_silent_video_whose_sound_is_wanted(processor, rows):
    row = replace(rows["video"], use_audio_in_video=True)
    with pytest.raises(RowError, match=r"silent\.mp4 can't be used: it has no audio track"):
        encode(processor, row)


def test_a_sound_too_short_for_a_frame_is_refused(processor, make, tmp_path):
    make.audio(tmp_path / "x.wav", make.tone(0.005))
    row = Row((("user", "<audio>"), ("assistant", "1")), audios=("x.wav",), root=tmp_path, source="x:1")
    with pytest.raises(RowError, match="x:1: "):
        encode(processor, row)


def test_an_error_of_the_hf_processor_names_the_row(processor, media, make, tmp_path):
    from PIL import Image

    Image.new("RGB", (1000, 2)).save(tmp_path / "x.png")
    row = Row((("user", "<image>"), ("assistant", "1")), images=("x.png",), root=tmp_path, source="x:1")
    with pytest.raises(RowError, match=r"x:1: .*aspect ratio") as caught:
        encode(processor, row)
    assert caught.value.cause == "processor_error"


def test_placeholders_must_match_the_media(processor, rows, monkeypatch):
    monkeypatch.setattr(type(processor), "expected_tokens", lambda self, media: {"<|image_pad|>": 5})
    with pytest.raises(RowError, match=r"6 <\|image_pad\|> in the tokens but the media give 5"):
        encode(processor, rows["image"])


def test_a_template_that_drops_answers_is_noticed(processor, rows):
    template = processor.hf.chat_template
    try:
        processor.hf.chat_template = template.replace(
            "for message in messages", "for message in messages if message is not sameas messages[1]"
        )
        with pytest.raises(RowError, match="1 answers found in the tokens but 2 in the row"):
            encode(processor, rows["turns"])
    finally:
        processor.hf.chat_template = template


def test_markers_of_another_family_are_refused(processor):
    with pytest.raises(ValueError, match="no special tokens for the turn markers 'ASSISTANT:'"):
        Processor(processor.hf, ChatMarkers("ASSISTANT:", "</s>"))


# ---------------------------------------------------------------- files


def test_saved_processor_loads_by_class_by_auto_and_by_us(processor, rows, tmp_path, arch):
    from transformers import AutoProcessor, Qwen3OmniMoeProcessor

    processor.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_omni_moe"}))
    assert isinstance(AutoProcessor.from_pretrained(tmp_path), Qwen3OmniMoeProcessor)
    assert isinstance(Qwen3OmniMoeProcessor.from_pretrained(tmp_path), Qwen3OmniMoeProcessor)
    again = build_processor(arch, str(tmp_path))
    for kind in KINDS:
        one, two = encode(processor, rows[kind]), encode(again, rows[kind])
        torch.testing.assert_close(one.input_ids, two.input_ids, rtol=0, atol=0, msg=f"{kind}: {{}}".format)
        torch.testing.assert_close(one.labels, two.labels, rtol=0, atol=0, msg=f"{kind}: {{}}".format)
        for name in one.media:
            torch.testing.assert_close(one.media[name], two.media[name], rtol=0, atol=0, msg=f"{kind}: {{}}".format)


def test_a_folder_without_limits_for_videos_keeps_the_class_default(processor, rows, tmp_path, arch):
    processor.save(tmp_path)
    file = tmp_path / "processor_config.json"
    config = json.loads(file.read_text())
    config["video_processor"]["size"] = config["image_processor"]["size"]
    file.write_text(json.dumps(config))
    grid = encode(build_processor(arch, str(tmp_path)), rows["video"]).media["video_grid_thw"]
    assert int(grid[0, 1:].prod()) // 4 >= 128  # Qwen3OmniMoeProcessorKwargs: at least 128 tokens a frame


def test_a_folder_without_a_processor_or_with_another_geometry_is_refused(processor, tmp_path, arch):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no processor can be loaded"):
        build_processor(arch, str(tmp_path / "empty"))
    processor.save(tmp_path / "p")
    thinker = arch["thinker_config"]
    other = {"thinker_config": {**thinker, "vision_config": {**thinker["vision_config"], "patch_size": 14}}}
    with pytest.raises(ConfigError, match=r"image_processor\.patch_size of .* is 16, but .* wants 14"):
        build_processor(other, str(tmp_path / "p"))


def test_config_may_be_the_thinker_or_an_object(arch):
    from transformers import Qwen3OmniMoeConfig

    assert build_processor(arch["thinker_config"]).clock["position_id_per_seconds"] == 13
    assert build_processor(Qwen3OmniMoeConfig()).clock["position_id_per_seconds"] == 25


def test_another_audio_chunk_than_transformers_knows_is_refused(arch):
    thinker = arch["thinker_config"]
    other = {**thinker, "audio_config": {**thinker["audio_config"], "n_window": 10}}
    with pytest.raises(ConfigError, match="n_window is 10"):
        build_processor(other)


def test_token_ids_of_the_bundled_tokenizer_are_those_of_the_tiny_size(processor):
    import yaml

    size = Path(__file__).parents[4] / "recipes/sizes/qwen3_omni/tiny.yaml"
    thinker = yaml.safe_load(size.read_text())["model"]["arch"]["thinker_config"]
    ids = processor.token_ids
    assert len(processor.tokenizer) == thinker["text_config"]["vocab_size"]
    assert {key: thinker[key] for key in ids} == ids
    assert processor.media_ids == set(ids.values())
    assert processor.pad_id not in processor.media_ids
