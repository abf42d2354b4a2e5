"""`PackedStep` without a model: expansion of placeholders, multi-token prediction's rows, places in the caller's batch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine import Batch
from torch import Tensor

from zoo.config.schema import PackingConfig
from zoo.packing import PackedLayout
from zoo.steps import Objective, PackedStep, StepRank
from zoo.steps.media import MediaStream, expand_row
from zoo.steps.shard import IGNORE

IMAGE = 99


@dataclass(frozen=True)
class Weighted(Batch):
    """A batch whose labels have weights."""

    weights: Tensor


@dataclass(frozen=True)
class Claims(Batch):
    """A batch that states what a step works out itself."""

    cu_seqlens: Tensor | None = None
    position_ids: Tensor | None = None
    layout: PackedLayout | None = None
    masked_is_true: bool | None = None


class Group:
    """Stands in for a process group where nothing is sent."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = (lambda: rank), (lambda: size)


class TileStep(PackedStep):
    """As LLaVA's: one placeholder an image, whose embeddings are counted by `tiles`."""

    def expand(
        self, layout: PackedLayout, ids: Tensor, labels: Tensor, source: Tensor, media: Mapping[str, Tensor]
    ) -> tuple[PackedLayout, Tensor, Tensor, Tensor]:
        return expand_row(layout, ids, labels, source, IMAGE, media["tiles"].tolist())

    def tower_tokens(self) -> Mapping[str, tuple[int, ...]]:
        return {"vision": (IMAGE,)}


def batch(rows: list[list[int]], labels: list[list[int]] | None = None, **media: Any) -> Batch:
    """Rows padded on the right."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    given = labels if labels is not None else rows
    wanted = torch.tensor([row + [IGNORE] * (width - len(row)) for row in given])
    return Batch(ids, wanted, mask, None, {name: torch.tensor(value) for name, value in media.items()})


def step(
    kind: type[PackedStep] = PackedStep, mode: str = "thd", align: int = 1, cp_group: Any = None, mtp_depths: int = 0
) -> Any:
    rank = StepRank(torch.device("cpu"), cp_group=cp_group)
    return kind(None, PackingConfig(mode=mode, align=align), rank, Objective(mtp_depths=mtp_depths))


MEDIA_ROWS = [[1, IMAGE, 2, IMAGE, 3], [4, 5], [IMAGE, 6]]
TILES = [3, 1, 2]
EXPANDED = [[1, IMAGE, IMAGE, IMAGE, 2, IMAGE, 3], [4, 5], [IMAGE, IMAGE, 6]]


def no_labels_on_media(rows: list[list[int]]) -> list[list[int]]:
    return [[IGNORE if token == IMAGE else token for token in row] for row in rows]


@pytest.mark.parametrize("mode", ["thd", "none"])
def test_placeholders_become_as_many_tokens_as_embeddings(mode: str) -> None:
    """Any number of media a sample, any number of tokens a medium; lengths, labels, positions and masks follow."""
    made = step(TileStep, mode, align=2)
    given = batch(MEDIA_ROWS, no_labels_on_media(MEDIA_ROWS), tiles=TILES)
    parts = made.pack(given, made.capture(given))
    other = batch(EXPANDED, no_labels_on_media(EXPANDED), tiles=TILES)
    wanted = made.pack(other, made.capture(other))
    assert parts.layout == wanted.layout and parts.layout.lengths == (7, 2, 3)
    for name in ("input_ids", "labels", "positions", "padding_mask", "token_index", "segment_ids"):
        torch.testing.assert_close(
            getattr(parts, name), getattr(wanted, name), rtol=0, atol=0, msg=f"{name}: {{}}".format
        )
    torch.testing.assert_close(parts.placements["vision"].rows, wanted.placements["vision"].rows, rtol=0, atol=0)
    real = parts.source >= 0  # every token of the caller's batch once, the first of a medium for its placeholder
    found = given.input_ids.flatten()[parts.source[real]]
    torch.testing.assert_close(found, parts.input_ids[real], rtol=0, atol=0)
    assert int(real.sum()) == 9


def test_expansion_comes_before_the_context_parallel_split() -> None:
    given = batch(MEDIA_ROWS, no_labels_on_media(MEDIA_ROWS), tiles=TILES)
    sources = []
    for rank in range(2):
        made = step(TileStep, align=4, cp_group=Group(rank, 2))
        inputs, _ = made.prepare(given)
        assert inputs.input_ids.shape == (1, 8)  # 7, 2 and 3 tokens, padded to 8, 4 and 4, on two ranks
        sources += inputs.placements["vision"].source.tolist()
    assert sorted(sources) == list(range(6))


@pytest.mark.parametrize(
    ("rows", "tiles", "message"),
    [
        ([[1, IMAGE, IMAGE, 2]], [3], "2 placeholder tokens"),
        ([[1, IMAGE]], [3, 2], "1 placeholder tokens"),
        ([[IMAGE] * 2, [IMAGE] * 4], [3, 3], "would end in another sample"),
        ([[IMAGE, 1, IMAGE, IMAGE]], [2, 1], "inside a medium"),
    ],
)
def test_conflicting_counts_are_an_error(rows: list[list[int]], tiles: list[int], message: str) -> None:
    made = step(TileStep)
    with pytest.raises(ValueError, match=message):
        made.prepare(batch(rows, tiles=tiles))


def test_multi_token_prediction_by_the_example_of_its_docstring() -> None:
    a, b, c, x, y = range(1, 6)
    given = batch([[a, b, c], [x, y]], [[IGNORE, b, c], [IGNORE, y]])
    made = step(align=4, mtp_depths=1)
    inputs, _ = made.prepare(given)
    assert inputs.input_ids.tolist() == [[a, b, c, 0, x, y, 0, 0]]
    assert inputs.label_rows.tolist() == [0, 1, 4] and inputs.targets.tolist() == [b, c, y]
    (ahead,) = inputs.mtp
    assert ahead.input_ids.tolist() == [[b, c, 0, 0, y, 0, 0, 0]]
    assert (~ahead.padding_mask).int().tolist() == [[1, 1, 0, 0, 1, 0, 0, 0]]
    assert ahead.label_rows.tolist() == [0] and ahead.targets.tolist() == [c]


SAMPLES = st.lists(st.lists(st.integers(1, 98), min_size=1, max_size=9), min_size=1, max_size=5)


@settings(deadline=None)  # other tests may run beside
@given(rows=SAMPLES, size=st.sampled_from([1, 2, 4]), depth=st.integers(1, 3), mode=st.sampled_from(["thd", "none"]))
def test_successors_over_ranks_and_segments(rows: list[list[int]], size: int, depth: int, mode: str) -> None:
    """Whatever the ranks, layout and depth: token t reads token t+k of its own sample, or nothing, and never padding."""
    align = 2 * size if size > 1 else 1
    given = batch(rows)
    seen, wanted = [], []
    sent: dict[int, list[tuple[int, int]]] = {rank: [] for rank in range(size)}  # tokens by where they go
    targets = []
    for rank in range(size):
        group = Group(rank, size) if size > 1 else None
        made = step(mode=mode, align=align, cp_group=group, mtp_depths=depth)
        parts = made.pack(given, made.capture(given))
        inputs, _ = made.shard(parts, {}, evaluate=False, logits=False)
        width = parts.input_ids.shape[1]
        layout = PackedLayout.from_lengths([width]) if mode == "none" else parts.layout
        index = layout.cp_index(rank, size)
        here = (parts.segment_ids[:, index], parts.token_index[:, index], parts.input_ids[:, index])
        ahead = inputs.mtp[depth - 1]
        for segment, at, token, after, masked in zip(
            *(part.flatten().tolist() for part in (*here, ahead.input_ids, ahead.padding_mask)), strict=True
        ):
            if segment < 0:
                assert after == 0 and masked
                continue
            seen.append((segment, at, token, after, masked))
        rows_of = here[0].shape[0]
        column, line = ahead.label_rows // rows_of, ahead.label_rows % rows_of
        tokens = list(zip(here[0][line, column].tolist(), here[1][line, column].tolist(), strict=True))
        exchange = ahead.label_exchange
        for to, count in enumerate([len(tokens)] if exchange is None else exchange.sent):
            sent[to] += tokens[:count]
            del tokens[:count]
        assert not tokens
        targets.append(ahead.targets.tolist())
    for rank, mine in enumerate(targets):
        for (segment, at), target in zip(sent[rank], mine, strict=True):
            assert rows[segment][at + depth + 1] == target
            wanted.append((segment, at))
    counts = [len(mine) for mine in targets]
    assert max(counts) - min(counts) <= 1
    expected = [
        (segment, at, row[at], row[at + depth] if at + depth < len(row) else 0, at + depth >= len(row))
        for segment, row in enumerate(rows)
        for at in range(len(row))
    ]
    assert sorted(seen) == sorted(expected)
    labelled = [(s, at) for s, row in enumerate(rows) for at in range(len(row) - depth - 1)]
    assert sorted(wanted) == labelled


def test_evaluation_runs_without_multi_token_prediction() -> None:
    made = step(mtp_depths=2)
    given = batch([[1, 2, 3, 4]])
    assert len(made.prepare(given)[0].mtp) == 2
    for mode in ("evaluate", "logits", "logprobs"):
        assert made.prepare(given, **{mode: True})[0].mtp == ()


@pytest.mark.parametrize("mode", ["thd", "none"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_logprobs_stand_where_the_caller_has_the_tokens(mode: str, side: str) -> None:
    """In (B, T0), at the token itself; 0 at a first token, on padding and, with labels, where there is none."""
    rows = [[5, 6, 7], [8], [9, 10]]
    given = batch(rows)
    if side == "left":
        flip = [given.input_ids, given.labels, given.attention_mask]
        ids, labels, mask = (tensor.flip(1) for tensor in flip)
        given = replace(given, input_ids=ids, labels=labels, attention_mask=mask)
    made = step(mode=mode, align=2)
    inputs, loss_inputs = made.prepare(replace(given, labels=None), logprobs=True)
    losses = inputs.targets.float().requires_grad_()  # as if the loss of a token were its id
    found = made.logprobs(losses, loss_inputs)
    (found * given.input_ids).sum().backward()
    torch.testing.assert_close(losses.grad, -inputs.targets.float(), rtol=0, atol=0)
    real = given.attention_mask == 1
    first = real & (real.cumsum(1) == 1)
    torch.testing.assert_close(found.detach(), -(given.input_ids * (real & ~first)).float(), rtol=0, atol=0)
    some = given.labels.masked_fill(given.labels == 7, IGNORE)
    inputs, loss_inputs = made.prepare(replace(given, labels=some), logprobs=True)
    found = made.logprobs(inputs.targets.float(), loss_inputs)
    torch.testing.assert_close(found, -(given.input_ids * (real & ~first & (some != IGNORE))).float(), rtol=0, atol=0)


def packed(lengths: tuple[int, ...] = (9, 14, 6), **claims: Any) -> Claims:
    """A packed row of three segments."""
    ids = torch.arange(1, sum(lengths) + 1)[None]
    return Claims(
        **{"input_ids": ids, "labels": ids, "attention_mask": None, "lengths": lengths, "media": {}, **claims}
    )


ONES = torch.ones(1, 29, dtype=torch.long)
PADDED = batch([[1, 2, 3], [4, 5]])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (packed(attention_mask=ONES), "lengths are .9, 14, 6., its attention_mask says .29."),
        (packed(attention_mask=ONES[:, :-1]), "mask has shape"),
        (packed(cu_seqlens=torch.tensor([0, 9, 29])), "cu_seqlens are .0, 9, 29."),
        (packed(position_ids=torch.arange(29)[None]), "row 0, token 9"),
        (packed(position_ids=torch.arange(28)[None]), "position_ids have shape"),
        (packed(layout=PackedLayout.from_lengths([9, 14, 6], align=2)), "layout has segments"),
        (packed(labels=torch.zeros(1, 28, dtype=torch.long)), "labels have shape"),
        (replace(PADDED, lengths=(3, 3)), "lengths are .3, 3., its attention_mask says .3, 2."),
        (Claims(**vars(PADDED), cu_seqlens=torch.tensor([0, 3, 6])), "cu_seqlens are"),
        (Claims(**vars(PADDED), position_ids=torch.tensor([[0, 1, 2], [3, 4, 4]])), "row 1, token 0"),
        *((Weighted(**vars(PADDED), weights=torch.ones(rows, 2)), "weights have shape") for rows in (2, 3)),
    ],
)
@pytest.mark.parametrize("mode", ["thd", "none"])
def test_what_a_batch_states_twice_agrees_or_is_an_error(given: Any, message: str, mode: str) -> None:
    with pytest.raises(ValueError, match=message):
        step(mode=mode).prepare(given)


@pytest.mark.parametrize("align", [1, 4])
def test_statements_that_agree_change_nothing(align: int) -> None:
    layout = PackedLayout.from_lengths([9, 14, 6], align=align)
    positions = torch.cat([torch.arange(n) for n in (9, 14, 6)])[None]
    known = {"position_ids": positions, "layout": layout, "cu_seqlens": layout.cu_seqlens}
    plain, _ = step(align=align).prepare(packed())
    for claims in (known, {"cu_seqlens": layout.cu_seqlens_padded}, {"position_ids": positions[None]}):
        inputs, _ = step(align=align).prepare(packed(**claims))
        torch.testing.assert_close(inputs.input_ids, plain.input_ids, rtol=0, atol=0)
    left = replace(PADDED, lengths=(3, 2))
    assert step().capture(left).lengths == (3, 2)
    assert step().capture(Claims(**vars(left), position_ids=torch.tensor([[0, 1, 2], [0, 1, 1]]))).lengths == (3, 2)


@pytest.mark.parametrize("kind", ["2-D", "4-D"])
def test_a_batch_names_the_sense_of_its_mask(kind: str) -> None:
    given = batch([[1, 2, 3], [4, 5], [6]])
    hidden = given.attention_mask == 0
    if kind == "4-D":
        hidden = (hidden[:, None, None, :] | hidden[:, None, :, None]) | torch.ones(3, 3, dtype=torch.bool).triu(1)
    megatron = replace(given, attention_mask=hidden)
    inputs, _ = step().prepare(Claims(**vars(megatron), masked_is_true=True))
    assert inputs.input_ids.tolist() == [[1, 2, 3, 4, 5, 6]]
    if kind == "4-D":
        with pytest.raises(ValueError, match="masked_is_true"):
            step().prepare(megatron)


class StreamStep(TileStep):
    """Says what its tower makes, too."""

    def expand(self, layout: PackedLayout, *row: Any) -> Any:
        return layout, *row[:3]

    def media_streams(self, media: Mapping[str, Tensor]) -> Mapping[str, tuple[MediaStream, ...]]:
        tiles = tuple(media["tiles"].tolist()) if "tiles" in media else ()
        return {"vision": (MediaStream("pixels", "tiles", tiles, tiles),) if tiles else ()}


@pytest.mark.parametrize(
    ("tiles", "pixels", "message"),
    [
        ([2, 1], 3, None),
        ([2, 2], 4, "3 placeholder tokens .* 4 embeddings"),
        ([2], 2, "3 placeholder tokens .* 2 embeddings"),
        ([2, 1], 4, "pixels have 4 rows, but tiles say 3"),
        ([], 0, "3 placeholder tokens"),
    ],
)
def test_media_and_their_placeholders_are_counted(tiles: list[int], pixels: int, message: str | None) -> None:
    given = batch([[1, IMAGE, IMAGE, 2], [IMAGE, 3]], **({"tiles": tiles, "pixels": [0.0] * pixels} if tiles else {}))
    if message is None:
        step(StreamStep).prepare(given)
        return
    with pytest.raises(ValueError, match=message):
        step(StreamStep).prepare(given)


@pytest.mark.parametrize("mode", ["thd", "none"])
def test_weights_follow_their_labels_through_the_expansion(mode: str) -> None:
    given = batch(MEDIA_ROWS, no_labels_on_media(MEDIA_ROWS), tiles=TILES)
    weights = given.input_ids.float() / 10  # a weight for each token
    made = step(TileStep, mode, align=2, mtp_depths=1)
    inputs, loss_inputs = made.prepare(Weighted(**vars(given), weights=weights))
    torch.testing.assert_close(loss_inputs.label_weights, inputs.targets.float() / 10)
    torch.testing.assert_close(loss_inputs.ahead_weights, inputs.mtp[0].targets.float() / 10)
    assert made.prepare(given)[1].label_weights is None


def test_weights_of_context_parallel_ranks_are_those_of_one() -> None:
    given = batch([[1, 2, 3, 4, 5, 6], [7, 8, 9]])
    weighted = Weighted(**vars(given), weights=given.input_ids.float() / 10)
    found = []
    for rank in range(2):
        inputs, loss_inputs = step(align=4, cp_group=Group(rank, 2)).prepare(weighted)
        torch.testing.assert_close(loss_inputs.label_weights, inputs.targets.float() / 10)
        found += loss_inputs.label_weights.tolist()
    _, alone = step(align=4).prepare(weighted)
    assert sorted(found) == sorted(alone.label_weights.tolist()) and len(found) == 7
