"""Keys beside a medium: each changes the sample as it says or is refused by name, and headers agree with decoding."""

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.every_processor import PATCHED, TILED, build

from zoo.config.entries import PixelLimits
from zoo.config.schema import DataConfig
from zoo.data.errors import RowError
from zoo.data.loading.sample_source import SampleSource
from zoo.data.media.decode import load_audio, load_image, load_video
from zoo.data.media.decoding_workers import DecodingWorkers
from zoo.data.media.sampling import Clip
from zoo.data.processors.fitting import Overlong
from zoo.data.processors.processor import Processor
from zoo.data.sample import Sample
from zoo.data.sources.formats import media_settings as settings
from zoo.data.sources.identity import digest_of, key_of
from zoo.data.sources.mixture import SampleId
from zoo.data.sources.references import Access
from zoo.data.sources.rows import Row, make_row

HOW: dict[str, Any] = {"video_fps": 2.0, "max_frames": 64}
SLOW = ("gemma4", "glm45v", "llava_next", "qwen25_omni", "gemma3")
LEVELS = [6 * n for n in range(40)]  # greys of a clip of 4 s


@pytest.fixture(scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in (*PATCHED, *TILED)])  # fmt: skip
def family(request: pytest.FixtureRequest, arch: dict) -> Processor:
    return build(request.param, arch)


@pytest.fixture(scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in PATCHED])  # fmt: skip
def patched(request: pytest.FixtureRequest, arch: dict) -> Processor:
    return build(request.param, arch)


@pytest.fixture(scope="module")
def timestamped(arch: dict) -> Processor:
    return build("timestamped", arch)


@pytest.fixture(scope="module")
def folder(make: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("settings")
    make.video(folder / "v.mp4", LEVELS, fps=10, side=64)
    make.video(folder / "heard.mp4", LEVELS, fps=10, sound=make.tone(4.0), side=64)
    make.audio(folder / "a.wav", make.tone(3.0))
    for name, size in (("i", (512, 384)), ("j", (300, 200))):
        Image.linear_gradient("L").resize(size).convert("RGB").save(folder / f"{name}.png")
    for number, level in enumerate(LEVELS[::5]):
        Image.new("RGB", (128, 64), (level,) * 3).save(folder / f"f{number}.png")
    return folder


FRAMES = [f"f{number}.png" for number in range(8)]


def asked(folder: Path, *parts: dict[str, Any], **more: Any) -> Row:
    content = [*parts, {"type": "text", "text": "?"}]
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "x"}]
    return make_row({"messages": turns, **more}, "x:1", Access(folder))


def image(name: str = "i.png", **keys: Any) -> dict[str, Any]:
    return {"type": "image", "image": name, **keys}


def video(name: Any = "v.mp4", **keys: Any) -> dict[str, Any]:
    return {"type": "video", "video": name, **keys}


def audio(**keys: Any) -> dict[str, Any]:
    return {"type": "audio", "audio": "a.wav", **keys}


def encoded(processor: Processor, row: Row, **how: Any) -> Sample:
    """The sample, whose size is the one by headers, where that is known."""
    sample = processor.encode(row, **{**HOW, **how})
    size = processor.measure(row, **{**HOW, **how})
    if size is not None:
        assert (size.length, {k: list(v) for k, v in size.media.items() if v}) == (
            sample.length,
            {k: list(v) for k, v in processor.tower_rows(sample.media).items() if v},
        )
    return sample


def same(one: Sample, other: Sample) -> bool:
    return torch.equal(one.input_ids, other.input_ids) and all(
        torch.equal(x, other.media[name]) for name, x in one.media.items()
    )


def times(processor: Processor, sample: Sample) -> list[str]:
    return re.findall(r"<([\d.]+) seconds>", processor.tokenizer.decode(sample.input_ids))


VALUES = {
    "fps": 5, "nframes": 4, "min_frames": 12, "max_frames": 4, "video_start": 2.0, "video_end": 2.0, "min_pixels": 300_000,
    "max_pixels": 4096, "total_pixels": 16_384, "resized_height": 64, "resized_width": 96, "audio_start": 1.0, "audio_end": 2.5,
}  # fmt: skip
PAIRED = {"resized_height": "resized_width", "resized_width": "resized_height"}


@pytest.mark.parametrize(("kind", "key"), [(kind, key) for kind, keys in settings.KEYS.items() for key in keys])
def test_every_key_changes_the_sample_or_is_refused_by_name(
    kind: str, key: str, family: Processor, folder: Path
) -> None:
    if kind not in family.modalities:
        pytest.skip("the family takes no such medium, so the key has nothing to change")
    part = {"image": image, "video": video, "audio": audio}[kind]
    keys = {one: VALUES[one] for one in (key, PAIRED.get(key)) if one}
    row = asked(folder, part(**keys))
    if key in settings.PIXEL_KEYS and not family.pixels_of_token:
        with pytest.raises(RowError, match=rf"{'|'.join(keys)}.* of {kind}s\[0\]: .*no limits of pixels"):
            encoded(family, row)
        return
    without = asked(folder, part())
    assert not same(encoded(family, row), encoded(family, without))
    assert digest_of(row) != digest_of(without) and key_of(row) != key_of(without)


def test_images_are_those_of_transformers_under_the_same_limits(patched: Processor, folder: Path) -> None:
    counted = getattr(patched, "_counted", 1)  # GLM's processor counts an image's pixels for each frame of a patch
    whole = load_image(folder / "i.png")
    for keys in ({"max_pixels": 20_000}, {"min_pixels": 300_000, "max_pixels": 400_000}):
        sample = encoded(patched, asked(folder, image(**keys)))
        size = dict(patched.hf.image_processor.size)
        low = min(keys.get("min_pixels", size["shortest_edge"] // counted), keys["max_pixels"])
        limits = {"shortest_edge": low * counted, "longest_edge": keys["max_pixels"] * counted}
        wanted = patched.hf.image_processor(whole, size=limits, return_tensors="pt")
        for name in ("image_grid_thw", "pixel_values"):
            torch.testing.assert_close(sample.media[name], wanted[name], rtol=0, atol=0)
    sample = encoded(patched, asked(folder, image(resized_height=70, resized_width=125)))
    assert sample.media["image_grid_thw"].tolist() == [[1, 4, 8]]


def test_other_images_of_the_row_are_as_without_settings(patched: Processor, folder: Path) -> None:
    row = asked(folder, image("i.png", max_pixels=8192), image("j.png"), image("i.png"))
    limits = PixelLimits(None, 40_000)
    sample, plain = (
        encoded(patched, row, pixels=limits),
        encoded(patched, asked(folder, image("j.png"), image("i.png")), pixels=limits),
    )
    count = len(plain.media["pixel_values"])
    torch.testing.assert_close(sample.media["pixel_values"][-count:], plain.media["pixel_values"], rtol=0, atol=0)
    assert int(sample.media["image_grid_thw"][0].prod()) * 256 <= 8192


def greys(processor: Processor, folder: Path, part: dict[str, Any]) -> list[float]:
    """The grey level of each frame that is decoded of a row's video."""
    seen: list[float] = []

    class Spy(DecodingWorkers):
        def video(self, *args: Any) -> Any:
            frames, rate = super().video(*args)
            seen.extend(frames.float().mean((1, 2, 3)).tolist())
            return frames, rate

    spy = Spy(1, 60.0, 2000)
    try:
        processor.encode(asked(folder, part), **HOW, decoder=spy)
    finally:
        spy.close()
    return seen


@pytest.mark.parametrize(
    ("keys", "wanted", "clock"),
    [
        ({"video_start": 2.0, "video_end": 3.0}, [2.0, 2.5], ["2.2"]),
        ({"video_start": 2.0, "video_end": 3.0, "fps": 4}, [2.0, 2.25, 2.5, 2.75], ["2.1", "2.6"]),
        ({"video_start": 1.0, "nframes": 4}, [1.0, 1.75, 2.5, 3.25], ["1.4", "2.9"]),
        ({"video_end": 1.5, "max_frames": 2}, [0.0, 0.75], ["0.4"]),
        ({"min_frames": 10, "fps": 1}, [0.4 * n for n in range(10)], ["0.2", "1.0", "1.8", "2.6", "3.4"]),
        ({"video_start": 2.0, "video_end": 2.2}, [2.0, 2.1], ["2.0"]),
        ({"video_start": 3.0, "video_end": 99}, [3.0, 3.5], ["3.2"]),
    ],
)  # fmt: skip
def test_the_seconds_that_a_row_names_are_seen(
    keys: dict, wanted: list[float], clock: list[str], timestamped: Processor, folder: Path
) -> None:
    """Times count from the video's beginning, as qwen-vl-utils has them."""
    assert times(timestamped, encoded(timestamped, asked(folder, video(**keys)))) == clock
    seen = greys(timestamped, folder, video(**keys))
    assert len(seen) == len(wanted)
    # a level of grey for each tenth of a second, which video coding changes a little
    assert all(abs(grey - 60 * at) <= 4 + 3 for grey, at in zip(seen, wanted, strict=True)), seen


def test_keys_are_what_the_recipe_s_are(family: Processor, folder: Path) -> None:
    if "video" not in family.modalities:
        pytest.skip("the family has no video to read settings of")
    for keys, how in (({"fps": 5}, {"video_fps": 5.0}), ({"max_frames": 4}, {"max_frames": 4})):
        plain = encoded(family, asked(folder, video()), **how)
        assert same(encoded(family, asked(folder, video(**keys))), plain)


def test_pixels_of_videos_are_those_of_a_frame(patched: Processor, folder: Path) -> None:
    """As qwen-vl-utils counts them; a pixel of `total_pixels` counts once in a temporal patch."""
    unit = patched.pixels_of_token
    for keys, tokens in (
        ({"max_pixels": 2 * unit}, 2), ({"total_pixels": 8 * unit}, 2), ({"resized_height": 64, "resized_width": 64}, 4),
        ({"min_pixels": 18 * unit, "max_pixels": 40 * unit}, 18),
    ):  # fmt: skip
        grid = encoded(patched, asked(folder, video(**keys))).media["video_grid_thw"][0].tolist()
        assert grid[0] == 4 and grid[1] * grid[2] == 4 * tokens, (keys, grid)


def test_two_parts_of_one_video_in_a_row(family: Processor, folder: Path) -> None:
    if "video" not in family.modalities:
        pytest.skip("the family has no video to read settings of")
    first, second = video(video_start=0.0, video_end=1.0), video(video_start=3.0, fps=4)
    both = encoded(family, asked(folder, first, second))
    name = next(name for name in both.media if name.startswith("pixel_values"))
    alone = [encoded(family, asked(folder, part)).media[name] for part in (first, second)]
    torch.testing.assert_close(both.media[name], torch.cat(alone), rtol=0, atol=0)
    if "video_second_per_grid" in both.media:
        assert both.media["video_second_per_grid"].tolist() == [1.0, 0.5]
    if "second_per_grid_ts" in both.media:
        assert both.media["second_per_grid_ts"].tolist() == [1.0, 0.5]


def test_workers_and_the_sample_cache_tell_settings_apart(timestamped: Processor, folder: Path) -> None:
    items = [
        {"messages": [{"role": "user", "content": [part, part]}, {"role": "assistant", "content": "x"}]}
        for part in (video(), video(fps=4), video(video_start=2), image(), image(max_pixels=4096))
    ]
    rows = [make_row(item, "x:1", Access(folder)) for item in items]  # of one place, as a bad source may have them
    workers = DecodingWorkers(2, 60.0, 2000)
    try:
        source = SampleSource.of_rows(rows, timestamped, DataConfig(), budget=4096, decoder=workers)
        ids = [SampleId(number) for number in range(len(rows))]
        source.prefetch(ids)
        samples = [source.encode(sample_id) for sample_id in ids]
    finally:
        workers.close()
    for row, sample in zip(rows, samples, strict=True):
        assert same(sample, timestamped.encode(row, video_fps=2.0, max_frames=768))
    assert not any(same(one, other) for one, other in itertools.combinations(samples, 2))


def test_media_with_settings_shrink_too(patched: Processor, folder: Path) -> None:
    row = asked(folder, image(min_pixels=200_000, max_pixels=300_000), video(resized_height=256, resized_width=256))
    sample = encoded(patched, row, overlong=Overlong(200, True))
    assert sample.length <= 200 and sample.fit is not None and sample.fit.done


def test_a_video_may_be_a_list_of_its_frames(family: Processor, folder: Path) -> None:
    if "video" not in family.modalities:
        pytest.skip("the family has no video to read settings of")
    turns = [{"role": "user", "content": "<video>?"}, {"role": "assistant", "content": "x"}]
    listed = make_row({"messages": turns, "videos": [FRAMES]}, "x:1", Access(folder))
    sample = encoded(family, listed)
    assert same(sample, encoded(family, asked(folder, video(FRAMES))))
    name = next(name for name in sample.media if name.startswith("pixel_values"))
    frames = torch.stack([torch.from_numpy(np.array(load_image(folder / one))) for one in FRAMES])
    size = {"size": dict(family.frame_size)} if family.pixels_of_token else {}
    wanted = family.hf.video_processor(frames.permute(0, 3, 1, 2), return_tensors="pt", do_sample_frames=False, **size)[
        "pixel_values_videos"
    ]
    torch.testing.assert_close(sample.media[name], wanted.flatten(0, 1) if wanted.dim() > 4 else wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("keys", "how", "clock"),
    [
        ({}, {}, ["0.2", "1.2", "2.2", "3.2"]),
        ({"sample_fps": 1}, {}, ["0.5", "2.5", "4.5", "6.5"]),
        ({"sample_fps": "1"}, {}, ["0.5", "2.5", "4.5", "6.5"]),
        ({"raw_fps": 4}, {}, ["0.1", "0.6", "1.1", "1.6"]),
        ({"fps": 4}, {"video_fps": 1.0}, ["0.1", "0.6", "1.1", "1.6"]),
        ({"sample_fps": 1, "raw_fps": 30}, {}, ["0.5", "2.5", "4.5", "6.5"]),
        ({"sample_fps": 1}, {"max_frames": 4}, ["1.0", "5.0"]),
        ({"sample_fps": 1, "video_start": 2, "video_end": 6}, {}, ["2.5", "4.5"]),
        ({"sample_fps": 1, "nframes": 2}, {}, ["2.0"]),
    ],
)
def test_frames_stand_at_the_rate_that_the_row_says(
    keys: dict, how: dict, clock: list[str], timestamped: Processor, folder: Path
) -> None:
    assert times(timestamped, encoded(timestamped, asked(folder, video(FRAMES, **keys)), **how)) == clock


def test_frames_of_a_list_must_be_images_of_one_size(timestamped: Processor, folder: Path) -> None:
    with pytest.raises(RowError, match="frame 1 has 512 x 384 pixels, those before 128 x 64"):
        timestamped.encode(asked(folder, video(["f0.png", "i.png"])), **HOW)
    with pytest.raises(RowError, match=r"no file .*gone.png"):
        asked(folder, video(["f0.png", "gone.png"])).check_files()
    with pytest.raises(RowError, match="a video of 0 frames"):
        asked(folder, video([]))
    one = encoded(timestamped, asked(folder, video(["f0.png"])))
    assert one.media["video_grid_thw"].tolist() == [[1, 4, 8]]


def test_sounds_are_heard_between_their_seconds(arch: dict, folder: Path) -> None:
    omni = build("omni", arch)
    part = encoded(omni, asked(folder, audio(audio_start=1.0, audio_end=2.5)))
    assert part.media["feature_lens"].tolist() == [150]
    row = asked(folder, video("heard.mp4", video_start=1.0, video_end=3.0), use_audio_in_video=True)
    sample = encoded(omni, row)
    assert sample.media["feature_lens"].tolist() == [200] and sample.media["video_grid_thw"][0, 0] == 2
    with pytest.raises(RowError, match=r"the part of a\.wav that is to be heard has under 0\.02 s, of 3 s"):
        encoded(omni, asked(folder, audio(audio_start=5)))
    assert len(load_audio(folder / "a.wav")) == 48_000


@pytest.mark.parametrize("name", ["omni", "qwen25_omni"])
def test_a_silent_video_among_others_with_sound(name: str, arch: dict, folder: Path) -> None:
    """It is a video as without its sound, whatever stands beside it."""
    omni = build(name, arch)
    silent, heard = video("v.mp4"), video("heard.mp4", video_end=3.0)
    sample = encoded(omni, asked(folder, silent, heard, audio(), use_audio_in_video=True))
    pieces = [
        encoded(omni, asked(folder, silent)),
        encoded(omni, asked(folder, heard, use_audio_in_video=True)),
        encoded(omni, asked(folder, audio())),
    ]
    for tensor in ("pixel_values_videos", "video_grid_thw", "video_second_per_grid", "input_features", "feature_lens"):
        wanted = torch.cat([piece.media[tensor] for piece in pieces if tensor in piece.media])
        torch.testing.assert_close(sample.media[tensor], wanted, rtol=0, atol=0, msg=f"{tensor}: {{}}".format)
    begin = len(omni.tokenizer(omni.tokenizer.decode(pieces[0].input_ids).split("<|vision_start|>")[0])["input_ids"])
    media = [piece.input_ids.tolist()[begin:] for piece in pieces]
    ends = [len(ids) - ids[::-1].index(omni.tokenizer.convert_tokens_to_ids(end)) for ids, end in zip(media, ("<|vision_end|>", "<|vision_end|>", "<|audio_end|>"), strict=True)]  # fmt: skip
    wanted_ids = list(itertools.chain.from_iterable(ids[:end] for ids, end in zip(media, ends, strict=True)))
    assert sample.input_ids.tolist()[begin : begin + len(wanted_ids)] == wanted_ids
    assert "silent videos beside videos with sound" in str(omni.incomparable(sample))
    with pytest.raises(RowError, match="it has no audio track"):
        encoded(omni, asked(folder, silent, use_audio_in_video=True))
    listed = encoded(omni, asked(folder, video(FRAMES), heard, use_audio_in_video=True))
    assert listed.media["feature_lens"].tolist() == pieces[1].media["feature_lens"].tolist()


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (video(fps=2, nframes=4), "has both nframes and fps; keep one"),
        (video(fps=0), r"fps of videos\[0\] is 0; a number above 0"),
        (video(fps=True), "fps of"),
        (video(nframes=2.5), "a whole number is wanted"),
        (video(video_start=3, video_end=2), "video_start=3 of .* is above video_end=2"),
        (video(video_start=2, video_end=2), "are the same: nothing is left"),
        (video(sample_fps=2), "has the key 'sample_fps', which zoo does not read of videos"),
        (video(max_pixel=2), "has the key 'max_pixel'"),
        (image(fps=2), "has the key 'fps', which zoo does not read of images; known: min_pixels"),
        (image(min_pixels=100, max_pixels=50), "min_pixels=100 of .* is above max_pixels=50"),
        (image(resized_height=64), "resized_height without resized_width"),
        (image(resized_height=64, resized_width=64, max_pixels=9), "has both resized_height and max_pixels"),
        (image(url="i.png"), "has both image and url; keep one"),
        ({"type": "text", "text": "a", "cache_control": {}}, "has the key 'cache_control'"),
        ({"type": "image_url", "image_url": {"url": "i.png", "detail": "low"}}, "detail=low"),
        ({"type": "image_url", "image_url": {"url": "i.png", "crop": 1}}, "has the key 'crop'"),
        ({"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav", "gain": 1}}, "has the key 'gain'"),
    ],
)  # fmt: skip
def test_keys_that_zoo_does_not_read_are_refused_by_name(part: dict, message: str, folder: Path) -> None:
    with pytest.raises(RowError, match=message):
        asked(folder, part)


def test_keys_of_no_value_are_none(timestamped: Processor, folder: Path) -> None:
    """As Arrow fills up parts of several kinds."""
    part = {"type": "image", "image": "i.png", "text": None, "video": None, "fps": None, "max_pixels": None}
    row = asked(folder, part, {"type": "text", "text": "a", "image": None, "fps": None})
    assert row.images == ("i.png",)


def test_media_in_lists_may_have_settings(timestamped: Processor, folder: Path) -> None:
    turns = [{"role": "user", "content": "<video><image>?"}, {"role": "assistant", "content": "x"}]
    row = make_row(
        {"messages": turns, "videos": [{"path": "v.mp4", "fps": 4}], "images": [{"image": "i.png", "max_pixels": 4096}]},
        "x:1",
        Access(folder),
    )  # fmt: skip
    assert same(encoded(timestamped, row), encoded(timestamped, asked(folder, video(fps=4), image(max_pixels=4096))))
    with pytest.raises(RowError, match="has the key 'rate'"):
        make_row(
            {"messages": turns, "videos": [{"path": "v.mp4", "rate": 4}], "images": ["i.png"]}, "x:1", Access(folder)
        )


def test_a_part_that_begins_behind_the_end_is_refused(timestamped: Processor, folder: Path) -> None:
    row = asked(folder, video(video_start=7))
    for read in (timestamped.encode, timestamped.measure):
        with pytest.raises(RowError, match="video_start=7 lies behind the end of the video, which is 4 s long"):
            read(row, **HOW)


def test_a_clip_is_decoded_as_its_own_file_would_be(folder: Path, make: Any, tmp_path: Path) -> None:
    make.video(tmp_path / "part.mp4", LEVELS[20:30], fps=10, side=64)
    frames, rate = load_video(folder / "v.mp4", 4.0, 64, Clip(2.0, 3.0))
    wanted, same_rate = load_video(tmp_path / "part.mp4", 4.0, 64)
    assert rate == same_rate and (frames.float() - wanted.float()).abs().max() <= 8
