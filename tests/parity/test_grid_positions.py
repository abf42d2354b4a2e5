"""Positions of any mixture of media equal transformers' get_rope_index, and start again in each segment."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import tiny_qwen3_vl, tiny_qwen35
from torch import Tensor
from transformers import AutoModel

from zoo.config.schema import PackingConfig
from zoo.packing import PackedLayout
from zoo.registry import get_family
from zoo.steps.vision import VisionStep

TEXT = 11  # a token of text
QUIET = settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@dataclass(frozen=True)
class Medium:
    """What stands in a row: text of `grid[0]` tokens, an image, or a video, of that grid in patches."""

    kind: str
    grid: tuple[int, int, int]


SIDES = st.tuples(st.integers(1, 4).map(lambda h: 2 * h), st.integers(1, 4).map(lambda w: 2 * w))
ROWS = st.lists(
    st.one_of(
        st.builds(Medium, st.just("text"), st.tuples(st.integers(1, 6), st.just(2), st.just(2))),
        st.builds(Medium, st.just("image"), SIDES.map(lambda sides: (1, *sides))),
        st.builds(Medium, st.just("video"), st.tuples(st.integers(1, 5), SIDES).map(lambda v: (v[0], *v[1]))),
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


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen35_vl"])
def family(request: pytest.FixtureRequest) -> Family:
    parts = get_family(request.param)
    config = {"qwen3_vl": tiny_qwen3_vl, "qwen35_vl": tiny_qwen35}[request.param].tiny_config()
    with torch.device("meta"):
        hf = AutoModel.from_config(config)
    return Family(config, hf, parts.load("step")(parts.load("config")(config), PackingConfig(), "cpu"))


def tokens(config: Any, row: list[Medium]) -> Tensor:
    """(L,) ids as the processor writes them: each frame of a video between start and end, behind its time."""
    ids: list[int] = []
    start, end = config.vision_start_token_id, config.vision_end_token_id
    for medium in row:
        time, height, width = medium.grid
        count = height * width // 4
        if medium.kind == "text":
            ids += [TEXT] * time
        elif medium.kind == "image":
            ids += [start, *[config.image_token_id] * count, end]
        else:
            frame = [TEXT, TEXT, start, *[config.video_token_id] * count, end]
            ids += [start, *frame * time, end]
    return torch.tensor(ids)


def media_of(row: list[Medium]) -> dict[str, Tensor]:
    grids = {kind: [m.grid for m in row if m.kind == kind] for kind in ("image", "video")}
    return {f"{kind}_grid_thw": torch.tensor(found) for kind, found in grids.items() if found}


def wanted(hf: Any, ids: Tensor, row: list[Medium]) -> Tensor:
    """(3, L) of transformers."""
    types = (ids == hf.config.image_token_id).int() + 2 * (ids == hf.config.video_token_id).int()
    return hf.get_rope_index(ids[None], types[None], **media_of(row))[0][:, 0]


@QUIET
@given(pack=st.lists(ROWS, min_size=1, max_size=4), align=st.sampled_from([1, 4, 7]), tail=st.integers(0, 3))
def test_positions_of_any_pack(pack: list[list[Medium]], align: int, tail: int, family: Family) -> None:
    config, step = family.config, family.step
    ids = [tokens(config, row) for row in pack]
    media = media_of([medium for row in pack for medium in row])
    total = PackedLayout.from_lengths([len(i) for i in ids], align).total + tail * align
    layout = PackedLayout.from_lengths([len(i) for i in ids], align, total)
    padding = config.image_token_id  # poison: what stands on padding must not matter
    positions = step.positions(layout.pack_list(ids, fill=padding), layout, media)
    assert positions.shape == (3, 1, total) and positions.dtype == torch.int64
    segments = positions[:, 0].split(list(layout.padded_lengths), dim=1)
    for segment, row, i in zip(segments, pack, ids, strict=True):
        assert torch.equal(segment[:, : len(i)], wanted(family.hf, i, row))
        behind = segment[:, len(i) :] - segment[:, : len(i)].max()
        assert torch.equal(behind, torch.arange(1, behind.shape[1] + 1).expand(3, -1))


def test_a_time_axis_of_a_video_stands_still_within_a_frame(family: Family) -> None:
    """Worked by hand: 1 token of text, then 2 frames of 1 x 2 tokens."""
    row = [Medium("text", (1, 2, 2)), Medium("video", (2, 2, 4))]
    ids = tokens(family.config, row)
    layout = PackedLayout.from_lengths([len(ids)])
    found = family.step.positions(ids[None], layout, media_of(row))[:, 0].T.tolist()
    text = [[n, n, n] for n in range(14)]
    first, second = [[5, 5, 5], [5, 5, 6]], [[11, 11, 11], [11, 11, 12]]
    assert found == [*text[:5], *first, *text[7:11], *second, text[13], [14, 14, 14]]


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
    ids = tokens(family.config, row)
    with pytest.raises(ValueError, match=complaint):
        family.step.positions(ids[None], PackedLayout.from_lengths([len(ids)]), media)
