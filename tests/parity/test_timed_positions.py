"""Positions of any mixture of media equal transformers' get_rope_index, and start again in each segment.

The token ids come from transformers' own processor (`written`), which decides how sound and frames of a video alternate.
"""

import itertools
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.engine import Zoo
from support.rows import make_examples
from support.tiny_qwen25_omni import load_thinker, write_tiny_qwen25_omni
from torch import Tensor

from zoo.packing import PackedLayout
from zoo.steps.omni import MediaCursor, sample_positions


@dataclass(frozen=True)
class Medium:
    """What stands in a row: text of `frames` letters, or a medium of that grid, seconds a temporal patch and mel frames."""

    kind: str
    grid: tuple[int, int, int] = (1, 2, 2)
    seconds: float = 1.0
    frames: int = 0


@pytest.fixture(scope="module", params=["qwen3_omni", "qwen25_omni"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Zoo, Any]:
    """A family's thinker in zoo and in transformers."""
    if request.param == "qwen3_omni":
        return request.getfixturevalue("zoo"), request.getfixturevalue("hf")
    folder = write_tiny_qwen25_omni(tmp_path_factory.mktemp("tiny_qwen25_omni"))
    zoo = Zoo.load(folder, request.getfixturevalue("cpu_world"), "model.family=qwen25_omni")
    return zoo, load_thinker(folder)


GRIDS = st.tuples(st.integers(1, 5), st.integers(1, 4).map(lambda h: 2 * h), st.integers(1, 4).map(lambda w: 2 * w))
TEXT = st.builds(Medium, st.just("text"), frames=st.integers(1, 6))
IMAGE = st.builds(Medium, st.just("image"), GRIDS.map(lambda grid: (1, *grid[1:])))
AUDIO = st.builds(Medium, st.just("audio"), frames=st.integers(3, 450))


def rows(seconds: st.SearchStrategy[float]) -> st.SearchStrategy[list[Medium]]:
    """Rows without sound in their videos, or with sound in all of them: use_audio_in_video is one word for a row."""
    video = st.builds(Medium, st.just("video"), GRIDS, seconds)
    spoken = st.builds(Medium, st.just("spoken"), GRIDS, seconds, st.integers(3, 450))
    silent_row = st.lists(st.one_of(TEXT, IMAGE, AUDIO, video), min_size=1, max_size=7)
    spoken_row = st.lists(st.one_of(TEXT, IMAGE, AUDIO, spoken, spoken), min_size=1, max_size=6)
    return st.one_of(silent_row, spoken_row)


EXACT = st.sampled_from([0.25, 0.5, 1.0, 2.0])  # times 13 and summed, these are without rounding in float32
ANY = st.floats(0.0625, 4.0, width=32)
QUIET = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def tokens(processor: Any, row: list[Medium]) -> Tensor:
    """(L,) ids as the HF processor writes them."""
    hf = processor.hf
    marks = {
        "image": hf.vision_bos_token + hf.image_token + hf.vision_eos_token,
        "video": hf.vision_bos_token + hf.video_token + hf.vision_eos_token,
        "spoken": hf.vision_bos_token + hf.video_token + hf.vision_eos_token,
        "audio": hf.audio_bos_token + hf.audio_token + hf.audio_eos_token,
    }
    text = "".join(marks.get(medium.kind, "x1 " * medium.frames) for medium in row)
    sounds = [medium.frames for medium in row if medium.kind in ("audio", "spoken")]
    videos = [medium for medium in row if medium.kind in ("video", "spoken")]
    clock = {"seconds_per_chunk": 2.0} | processor.clock
    images = [torch.tensor(medium.grid).numpy() for medium in row if medium.kind == "image"]
    kinds = [medium.kind for medium in row if medium.kind in ("audio", "spoken")]
    heard = [number for number, kind in enumerate(kinds) if kind == "spoken"]
    of_videos = {
        "video_grid_thw": [torch.tensor(medium.grid).numpy() for medium in videos],
        "video_second_per_grid": [medium.seconds for medium in videos],
    }
    text = written(hf, text, [processor.audio_tokens(n) for n in sounds], images, of_videos, heard, clock)
    return torch.tensor(hf.tokenizer(text)["input_ids"])


def written(
    hf: Any,
    text: str,
    sounds: list[int],
    images: list[Any],
    videos: dict[str, list[Any]],
    heard: list[int],
    clock: dict[str, float],
) -> str:
    """The text with a token for each embedding of its media, as the HF processor writes them.

    `sounds` are tokens of each, `heard` the numbers of those that are the videos'.
    """
    if not hasattr(hf, "replace_video_with_audio_token"):  # before transformers 5.23
        each = iter(sounds), iter(images)
        of_videos = {key: iter(values) for key, values in videos.items()}
        (text,) = hf.replace_multimodal_special_tokens(
            [text], *each, **of_videos, use_audio_in_video=bool(heard), **clock
        )
        return text
    by_token = {hf.image_token: iter(range(len(images))), hf.video_token: itertools.count()}
    by_token[hf.audio_token] = (number for number in range(len(sounds)) if number not in heard)
    of_sounds = {"num_audio_tokens": sounds}
    options = {
        "processed_audio": of_sounds,
        "video_to_audio_indices": heard,
        "load_audio_from_video": bool(heard),
        **clock,
    }

    def tokens_of(match: re.Match[str]) -> str:
        number = next(by_token[match[0]])
        if match[0] == hf.image_token:
            return hf.replace_image_token({"image_grid_thw": images}, number)
        if match[0] == hf.audio_token:
            return hf.replace_audio_token(of_sounds, number)
        return hf.replace_video_token(videos, number, **options)

    return re.sub("|".join(map(re.escape, by_token)), tokens_of, text)


def tensors(row: list[Medium]) -> dict[str, Tensor]:
    """What positions read of the row's media, as the sample would hold it."""
    videos = [medium for medium in row if medium.kind in ("video", "spoken")]
    images = [medium.grid for medium in row if medium.kind == "image"]
    sounds = [medium.frames for medium in row if medium.kind in ("audio", "spoken")]
    media = {"image_grid_thw": torch.tensor(images)} if images else {}
    if videos:
        media["video_grid_thw"] = torch.tensor([medium.grid for medium in videos])
        media["video_second_per_grid"] = torch.tensor([medium.seconds for medium in videos])
    if sounds:
        media["feature_lens"] = torch.tensor(sounds)
    return media


def wanted(hf: Any, ids: Tensor, media: dict[str, Tensor], spoken: bool) -> Tensor:
    """(3, L) of transformers."""
    found, _ = hf.get_rope_index(
        ids[None],
        media.get("image_grid_thw"),
        media.get("video_grid_thw"),
        torch.ones(1, len(ids), dtype=torch.long),
        spoken,
        media.get("feature_lens"),
        media.get("video_second_per_grid"),
    )
    return found[:, 0]


def found(zoo: Zoo, ids: Tensor, media: dict[str, Tensor]) -> Tensor:
    """(3, L) of zoo, every medium of the row used up."""
    step = zoo.step()
    cursor: MediaCursor = step._cursor(media, step._tokens())
    positions = sample_positions(ids, step._tokens(), cursor)
    cursor.finish()
    return positions


def fits(found: Tensor, wanted: Tensor) -> bool:
    """Whether positions are the same; transformers' may be whole numbers."""
    return torch.equal(found, wanted.to(found.dtype))


def is_spoken(row: list[Medium]) -> bool:
    return any(medium.kind == "spoken" for medium in row)


@pytest.mark.sampled(2)
@QUIET
@given(row=rows(EXACT))
def test_positions_of_any_mixture(row: list[Medium], both: tuple[Zoo, Any]) -> None:
    zoo, hf = both
    ids, media = tokens(zoo.assembly.processor, row), tensors(row)
    assert fits(found(zoo, ids, media), wanted(hf, ids, media, is_spoken(row)))


@QUIET
@given(row=rows(ANY))
def test_positions_at_any_frame_rate(row: list[Medium], zoo: Zoo, hf: Any) -> None:
    """Frame times that float32 rounds, in another order than transformers: to a few units in the last place."""
    ids, media = tokens(zoo.assembly.processor, row), tensors(row)
    torch.testing.assert_close(found(zoo, ids, media), wanted(hf, ids, media, is_spoken(row)), rtol=1e-6, atol=1e-4)


@pytest.mark.sampled(2)
@QUIET
@given(pack=st.lists(rows(EXACT), min_size=1, max_size=4), align=st.sampled_from([1, 4, 7]), tail=st.integers(0, 3))
def test_positions_restart_in_each_segment(
    pack: list[list[Medium]], align: int, tail: int, both: tuple[Zoo, Any]
) -> None:
    """Rows with and without sound in their videos share a pack."""
    zoo, hf = both
    ids = [tokens(zoo.assembly.processor, row) for row in pack]
    media = [tensors(row) for row in pack]
    names = dict.fromkeys(name for each in media for name in each)
    joined = {name: torch.cat([each[name] for each in media if name in each]) for name in names}
    total = PackedLayout.from_lengths([len(i) for i in ids], align).total + tail * align
    layout = PackedLayout.from_lengths([len(i) for i in ids], align, total)
    step = zoo.step()
    positions = step.positions(layout.pack_list(ids, fill=zoo.assembly.processor.pad_id), layout, joined)
    assert positions.shape == (3, 1, total)
    for segment, row, i, each in zip(
        positions[:, 0].split(layout.padded_lengths, dim=1), pack, ids, media, strict=True
    ):
        assert fits(segment[:, : len(i)], wanted(hf, i, each, is_spoken(row)))
        assert float(segment[:, 0].max()) == 0
        behind = segment[:, len(i) :] - segment[:, : len(i)].max()
        torch.testing.assert_close(behind, torch.arange(1.0, behind.shape[1] + 1).expand(3, -1), rtol=0, atol=0)


@pytest.mark.sampled(2)
def test_positions_of_the_real_rows(both: tuple[Zoo, Any]) -> None:
    zoo, hf = both
    for name, example in make_examples(zoo.assembly.processor).items():
        sample = example.sample
        want = wanted(hf, sample.input_ids, sample.media, example.features["use_audio_in_video"])
        assert fits(found(zoo, sample.input_ids, sample.media), want), name


def test_a_start_token_without_its_medium_is_refused(zoo: Zoo) -> None:
    start = zoo.assembly.config.thinker.vision_start_token_id
    with pytest.raises(ValueError, match="token 7 follows"):
        found(zoo, torch.tensor([5, start, 7, 8]), {})
