"""Positions of any mixture of media equal transformers' get_rope_index, and start again in each segment."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packaging.version import Version
from support import tiny_glm45v, tiny_qwen3_vl, tiny_qwen25_vl, tiny_qwen35
from torch import Tensor
from transformers import AutoModel

from zoo.config.schema import PackingConfig
from zoo.packing import PackedLayout
from zoo.registry import get_family
from zoo.steps import StepRank
from zoo.steps.vision import VisionStep

TEXT = 11  # a token of text
QUIET = settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@dataclass(frozen=True)
class Medium:
    """What stands in a row: text of `grid[0]` tokens, an image, or a video, of that grid in patches."""

    kind: str
    grid: tuple[int, int, int]
    seconds: float = 1.0  # from one frame of a video to the next


# Parts of a second are dropped by transformers before 5.18.
WHOLE = Version(transformers.__version__) < Version("5.18")
SECONDS = st.sampled_from([1.0, 2.0, 3.0] if WHOLE else [0.25, 0.5, 2 / 3, 1.0, 1.5, 2.0])
SIDES = st.tuples(st.integers(1, 4).map(lambda h: 2 * h), st.integers(1, 4).map(lambda w: 2 * w))
ROWS = st.lists(
    st.one_of(
        st.builds(Medium, st.just("text"), st.tuples(st.integers(1, 6), st.just(2), st.just(2))),
        st.builds(Medium, st.just("image"), SIDES.map(lambda sides: (1, *sides))),
        st.builds(Medium, st.just("video"), st.tuples(st.integers(1, 5), SIDES).map(lambda v: (v[0], *v[1])), SECONDS),
    ),
    min_size=1,
    max_size=7,
)


@dataclass(frozen=True)
class Family:
    """One that places its media so: its step, and transformers' model of the same config."""

    config: Any
    hf: Any
    step: VisionStep

    @property
    def whole(self) -> bool:
        """Whether a video stands as a whole, on a clock; else each frame stands behind its time."""
        return hasattr(self.config.vision_config, "tokens_per_second")

    @property
    def around(self) -> list[int]:
        """Tokens before and behind an image or a frame, then before and behind a video."""
        config, kinds = self.config, ("image", "video") if self.shared else ("vision", "vision")
        return [getattr(config, f"{kind}_{end}_token_id") for kind in kinds for end in ("start", "end")]

    @property
    def shared(self) -> bool:
        """Whether frames have the placeholders of images."""
        return hasattr(self.config, "video_start_token_id")

    def positions(self, ids: Tensor, layout: PackedLayout, media: dict[str, Tensor]) -> Tensor:
        """(3, 1, T) of a packed row (1, T), as the step comes to them."""
        layout, ids, *_ = self.step.expand(layout, ids, ids, ids, media)
        return self.step.positions(ids, layout, media)


TINY = {"qwen3_vl": tiny_qwen3_vl, "qwen35_vl": tiny_qwen35, "qwen25_vl": tiny_qwen25_vl, "glm45v": tiny_glm45v}


def made(name: str) -> Family:
    parts, config = get_family(name), TINY[name].tiny_config()
    with torch.device("meta"):
        hf = AutoModel.from_config(config)
    return Family(
        config, hf, parts.load("step")(parts.load("config")(config), PackingConfig(), StepRank(torch.device("cpu")))
    )


@pytest.fixture(scope="module", params=TINY)
def family(request: pytest.FixtureRequest) -> Family:
    return made(request.param)


def tokens(family: Family, row: list[Medium]) -> Tensor:
    """(L,) ids as the processor writes them."""
    ids: list[int] = []
    config = family.config
    start, end, begin, finish = family.around
    framed = config.image_token_id if family.shared else config.video_token_id
    for medium in row:
        time, height, width = medium.grid
        count = height * width // 4
        if medium.kind == "text":
            ids += [TEXT] * time
        elif medium.kind == "image":
            ids += [start, *[config.image_token_id] * count, end]
        elif family.whole:
            ids += [start, *[config.video_token_id] * count * time, end]
        else:
            frame = [TEXT, TEXT, start, *[framed] * count, end]
            ids += [begin, *frame * time, finish]
    return torch.tensor(ids)


def media_of(row: list[Medium]) -> dict[str, Tensor]:
    grids = {kind: [m.grid for m in row if m.kind == kind] for kind in ("image", "video")}
    media = {f"{kind}_grid_thw": torch.tensor(found) for kind, found in grids.items() if found}
    seconds = [m.seconds for m in row if m.kind == "video"]
    return {**media, "second_per_grid_ts": torch.tensor(seconds)} if seconds else media


def wanted(family: Family, ids: Tensor, row: list[Medium]) -> Tensor:
    """(3, L) of transformers."""
    hf, media = family.hf, media_of(row)
    if not family.whole:
        media.pop("second_per_grid_ts", None)
    types = (ids == hf.config.image_token_id).int() + 2 * (ids == hf.config.video_token_id).int()
    if family.shared:
        begun, ended = ((ids == token).cumsum(0) for token in family.around[2:])
        types += types * (begun > ended)
    return hf.get_rope_index(ids[None], types[None], **media)[0][:, 0]


@pytest.mark.sampled(2)
@QUIET
@given(pack=st.lists(ROWS, min_size=1, max_size=4), align=st.sampled_from([1, 4, 7]), tail=st.integers(0, 3))
def test_positions_of_any_pack(pack: list[list[Medium]], align: int, tail: int, family: Family) -> None:
    config = family.config
    ids = [tokens(family, row) for row in pack]
    media = media_of([medium for row in pack for medium in row])
    total = PackedLayout.from_lengths([len(i) for i in ids], align).total + tail * align
    layout = PackedLayout.from_lengths([len(i) for i in ids], align, total)
    padding = config.image_token_id  # poison: what stands on padding must not matter
    positions = family.positions(layout.pack_list(ids, fill=padding), layout, media)
    assert positions.shape == (3, 1, total) and positions.dtype == torch.int64
    segments = positions[:, 0].split(list(layout.padded_lengths), dim=1)
    for segment, row, i in zip(segments, pack, ids, strict=True):
        torch.testing.assert_close(segment[:, : len(i)], wanted(family, i, row), rtol=0, atol=0)
        behind = segment[:, len(i) :] - segment[:, : len(i)].max()
        torch.testing.assert_close(behind, torch.arange(1, behind.shape[1] + 1).expand(3, -1), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen35_vl", "glm45v"])
def test_a_time_axis_of_a_video_stands_still_within_a_frame(name: str) -> None:
    """Worked by hand: 1 token of text, then 2 frames of 1 x 2 tokens."""
    row, family = [Medium("text", (1, 2, 2)), Medium("video", (2, 2, 4))], made(name)
    ids = tokens(family, row)
    layout = PackedLayout.from_lengths([len(ids)])
    found = family.positions(ids[None], layout, media_of(row))[:, 0].T.tolist()
    text = [[n, n, n] for n in range(14)]
    first, second = [[5, 5, 5], [5, 5, 6]], [[11, 11, 11], [11, 11, 12]]
    assert found == [*text[:5], *first, *text[7:11], *second, text[13], [14, 14, 14]]


@pytest.mark.parametrize(
    ("seconds", "times"), [(1.0, [0, 3, 6]), (0.5, [0, 1, 3]), (0.25, [0, 0, 1]), (2.0, [0, 6, 12])]
)
def test_a_video_that_stands_as_a_whole_is_on_a_clock(seconds: float, times: list[int]) -> None:
    """Worked by hand: 3 positions a second, rounded down; 1 token of text, then 3 frames of 1 x 2 tokens, then text."""
    row, family = [Medium("text", (1, 2, 2)), Medium("video", (3, 2, 4), seconds)], made("qwen25_vl")
    ids = tokens(family, row)
    found = family.step.positions(ids[None], PackedLayout.from_lengths([len(ids)]), media_of(row))[:, 0].T
    frames = [[2 + time, 2, 2 + column] for time in times for column in range(2)]
    assert found.tolist() == [[0, 0, 0], [1, 1, 1], *frames, [4, 4, 4]]


def test_there_is_a_time_for_each_video() -> None:
    row, family = [Medium("video", (3, 2, 4))], made("qwen25_vl")
    ids, media = tokens(family, row), media_of(row) | {"second_per_grid_ts": torch.ones(2)}
    with pytest.raises(ValueError, match=r"times of 2 video\(s\), but 1 video"):
        family.step.positions(ids[None], PackedLayout.from_lengths([len(ids)]), media)


@pytest.mark.parametrize(
    ("row", "media", "complaint"),
    [
        ([Medium("image", (1, 4, 4))], {}, "asks for a medium"),
        ([Medium("text", (3, 2, 2))], {"image_grid_thw": torch.tensor([[1, 4, 4]])}, "have no token"),
        ([Medium("image", (1, 4, 4))], {"image_grid_thw": torch.tensor([[1, 4, 6]])}, "2 x 3 tokens begins"),
    ],
    ids=["no grid", "a grid too many", "another size"],
)
def test_tokens_and_grids_must_agree(
    row: list[Medium], media: dict[str, Tensor], complaint: str, family: Family
) -> None:
    ids = tokens(family, row)
    with pytest.raises(ValueError, match=complaint):
        family.step.positions(ids[None], PackedLayout.from_lengths([len(ids)]), media)
