"""A loop's batch: what is refused, how rows become micro-batches, and what the caller's loss gets of them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo.packing.binning import spread
from zoo.rl.batch import PaddedRows, Sparse, bins_of

PROCESSOR = SimpleNamespace(media_tensors=lambda features: {"patches": features["pixel_values"]})


def batch(**changed: Any) -> dict[str, Any]:
    ids = torch.arange(12).view(3, 4)
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]])
    return {"input_ids": ids, "attention_mask": mask} | changed


EXPERTS = Sparse(2, 5, 2)


@pytest.mark.parametrize(
    ("changed", "temperature", "said"),
    [
        ({"attention_mask": None}, 1.0, "no tensor attention_mask"),
        ({"input_ids": torch.arange(4)}, 1.0, r"shape \(4,\); \(B, T\)"),
        ({"attention_mask": torch.ones(3, 5)}, 1.0, r"shape \(3, 5\), its input_ids \(3, 4\)"),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1]] * 3)}, 1.0, "Row 0 of the mask has a hole"),
        ({"loss_mask": torch.ones(3, 4), "response_mask": torch.ones(3, 4)}, 1.0, "two names for the same"),
        ({"loss_mask": torch.full((3, 4), 0.5)}, 1.0, "other than 0 and 1"),
        ({"media": [None]}, 1.0, "1 entries; wanted a list of 3"),
        ({"media": {"pixel_values": torch.ones(1)}}, 1.0, "a mapping; wanted a list of 3"),
        ({}, 0.0, "temperature is 0"),
        ({}, torch.ones(2), r"temperature has shape \(2,\)"),
    ],
)
def test_a_wrong_batch_is_refused(changed: dict[str, Any], temperature: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PaddedRows.read(batch(**changed), PROCESSOR, temperature)


@pytest.mark.parametrize(
    ("routing", "sparse", "said"),
    [
        (torch.zeros(3, 4, 2, 2, dtype=torch.int16), None, "the model has no experts"),
        (torch.zeros(3, 4, 2).short(), EXPERTS, r"shape \(3, 4, 2\); integers of shape \(3, 4, 2, 2\)"),
        (torch.zeros(3, 4, 2, 2), EXPERTS, "integers of shape"),
        (torch.full((3, 4, 2, 2), 5), EXPERTS, "from 5 to 5; experts 0 to 4"),
        (torch.full((3, 4, 2, 2), -2), EXPERTS, "from -2 to -2"),
        (torch.zeros(3, 4, 2, 2).long(), EXPERTS, "names an expert twice"),
    ],
)
def test_routing_that_is_none_of_the_model_is_refused(routing: Any, sparse: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PaddedRows.read(batch(routing=routing), PROCESSOR, sparse=sparse)


def test_routing_of_padding_is_not_read() -> None:
    routing = torch.tensor([0, 1]).expand(3, 4, 2, 2).clone()
    given = batch()
    routing[given["attention_mask"] == 0] = 0
    assert (given["attention_mask"] == 0).any()
    PaddedRows.read(given | {"routing": routing}, PROCESSOR, sparse=EXPERTS)


def test_rows_are_taken_with_all_that_is_theirs() -> None:
    media = [{"pixel_values": torch.ones(2, 1)}, None, {"pixel_values": torch.full((1, 1), 3.0)}]
    mask = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1], [1, 0, 0, 1]])
    given = batch(response_mask=mask, media=media, advantages=torch.arange(3.0), names=["a", "b", "c"], beta=0.1)
    rows = PaddedRows.read(given, PROCESSOR, torch.tensor([1.0, 2.0, 3.0]))
    assert rows.lengths == (3, 2, 4) and len(rows) == 3
    assert rows.targets == 1 + 1 + 1, "no padding, and no row's first token"
    taken = rows.take([2, 0], filler=7)
    assert taken.input_ids.tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
    assert taken.labels is not None
    assert taken.labels.tolist() == [[8, -100, -100, 11], [-100, 1, -100, 3]]
    assert taken.media["patches"].tolist() == [[3.0], [1.0], [1.0]]
    torch.testing.assert_close(torch.as_tensor(rows.temperatures([2, 0])), torch.tensor([3.0, 1.0]), rtol=0, atol=0)
    part = rows.part([2, 0], torch.device("cpu"))
    assert part["advantages"].tolist() == [2.0, 0.0] and part["names"] == ["c", "a"] and part["beta"] == 0.1


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 16), max_size=20), st.integers(1, 30))
def test_every_row_is_counted_once(lengths: list[int], count: int) -> None:
    bins = spread(bins_of(lengths, budget=16, align=2), count)
    assert len(bins) >= count
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    assert all(sum(-(-lengths[row] // 2) * 2 for row in rows) <= 16 for rows in bins)


def test_a_row_over_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match=r"row 1 of the batch has 15 tokens \(padded to a multiple of 4\)"):
        bins_of([3, 15], budget=15, align=4)
    assert bins_of([3, 12], budget=16, align=4) == [(0, 1)]


def test_a_batch_may_have_no_row() -> None:
    empty = torch.zeros(0, 0, dtype=torch.int64)
    given = {"input_ids": empty, "attention_mask": empty, "loss_mask": empty.bool(), "media": []}
    routing = torch.zeros(0, 0, 2, 1, dtype=torch.int64)
    rows = PaddedRows.read({**given, "routing": routing}, PROCESSOR, torch.zeros(0), Sparse(2, 4, 1))
    assert (len(rows), rows.lengths, rows.targets) == (0, (), 0)
    filler = rows.take((), filler=7)
    assert filler.input_ids.tolist() == [[7]] and not filler.media
    assert rows.temperatures(()) == 1.0 and rows.routing(()) is None
