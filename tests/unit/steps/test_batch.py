"""A micro-batch's layout: built once where the batch is made, held against the batch, and left as it was."""

import pickle
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from zoo.config.schema import PackingConfig
from zoo.data.sample import MicroBatch, Sample, collate
from zoo.packing import PackedLayout
from zoo.steps import Objective, PackedStep, StepRank
from zoo.steps.batch import layout_of


def loaded(align: int, pad_to: int | None = None) -> MicroBatch:
    """Three samples as the loader packs them."""
    rows = [torch.arange(1, n + 1) for n in (9, 14, 6)]
    samples = [Sample(ids, ids) for ids in rows]
    return collate(samples, PackedLayout.from_lengths([len(ids) for ids in rows], align, pad_to))


def step(align: int, pad_to: int | None = None, mode: Any = "thd", vocabulary: int | None = None) -> PackedStep:
    config: Any = None  # a plain step reads nothing of it
    packing = PackingConfig(mode=mode, align=align, pad_to=pad_to)
    return PackedStep(config, packing, StepRank(torch.device("cpu")), Objective(mtp_depths=1), vocabulary=vocabulary)


@pytest.mark.parametrize(("align", "pad_to"), [(1, None), (4, None), (4, 64)])
def test_the_loaders_layout_is_not_built_again(align: int, pad_to: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = loaded(align, pad_to)
    plain, _ = step(align, pad_to).prepare(replace(batch, layout=None))

    def again(*_: Any, **__: Any) -> PackedLayout:
        raise AssertionError("the layout is built again")

    monkeypatch.setattr(PackedLayout, "from_lengths", again)
    monkeypatch.setattr(PackedLayout, "from_mask", again)
    inputs, _ = step(align, pad_to).prepare(batch)
    torch.testing.assert_close(inputs.input_ids, plain.input_ids, rtol=0, atol=0)
    torch.testing.assert_close(inputs.positions, plain.positions, rtol=0, atol=0)
    torch.testing.assert_close(inputs.mtp[0].input_ids, plain.mtp[0].input_ids, rtol=0, atol=0)
    assert inputs.seq_params.layout == batch.layout


def test_what_a_call_makes_is_not_kept_with_the_batch() -> None:
    """Index tensors of a call, on its device, are freed with it, though a loader's batches live for a step."""
    batch = loaded(4)
    sent = pickle.loads(pickle.dumps(batch))
    assert sent.layout == batch.layout
    torch.testing.assert_close(step(4).prepare(sent)[0].positions, step(4).prepare(batch)[0].positions, rtol=0, atol=0)
    before = set(batch.layout._memo.tensors)
    inputs, _ = step(4).prepare(batch)
    assert inputs.seq_params.layout._memo.tensors.keys() > before
    assert set(batch.layout._memo.tensors) == before


@dataclass(frozen=True)
class Own:
    """A packed batch of another loop."""

    input_ids: Tensor
    lengths: tuple[int, ...] | None = None
    layout: Any = None
    labels: Tensor | None = None
    attention_mask: Tensor | None = None
    media: Any = None


IDS = torch.arange(12)[None]
LAYOUT = PackedLayout.from_lengths([4, 3], align=4)  # 7 tokens, 8 with padding


@pytest.mark.parametrize("tokens", [7, 8])
def test_a_layout_alone_says_enough(tokens: int) -> None:
    found = layout_of(Own(IDS[:, :tokens], layout=LAYOUT), 4, None)
    assert found == LAYOUT and (found.align, found.pad_to) == (4, None)


def test_the_steps_padding_goes_for_an_expansion() -> None:
    """A layout whose lengths are multiples of 4 by chance is one of align 4."""
    found = layout_of(Own(IDS[:, :8], layout=PackedLayout.from_lengths([4, 4])), 4, None)
    assert found.expand([[(0, 2)], []]).padded_lengths == (8, 4)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (Own(IDS[:, :8], (3, 4), LAYOUT), "layout has lengths .4, 3., its lengths are .3, 4."),
        (Own(IDS[:, :8], (4, 4), LAYOUT), "layout has lengths .4, 3., its lengths are .4, 4."),
        (Own(IDS[:, :7], (4, 3), PackedLayout.from_lengths([4, 3])), "segments of .4, 3. tokens, the step's .4, 4."),
        (Own(IDS[:, :12], None, PackedLayout.from_lengths([4, 3], 4, 12)), "segments of .4, 8. tokens, the step's .4, 4."),
        (Own(IDS[:, :9], None, LAYOUT), "input_ids has shape .1, 9., its lengths sum to 7 .padded 8."),
        (Own(IDS[:, :8].view(2, 4), None, LAYOUT), "input_ids has shape .2, 4."),
        (Own(IDS[:, :8], None, SimpleNamespace(lengths=(4, 3))), "layout is a SimpleNamespace"),
        (Own(IDS[:, :8], None, None), "neither lengths nor an attention_mask"),
    ],
)  # fmt: skip
def test_a_layout_that_contradicts_its_batch_is_refused(batch: Own, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout_of(batch, 4, None)


@pytest.mark.parametrize(("ids", "labels"), [([1, 9], None), ([-1, 2], None), ([1, 2], [-100, 9])])
@pytest.mark.parametrize("mode", ["thd", "none"])
def test_an_id_without_a_row_is_named(mode: str, ids: list[int], labels: list[int] | None) -> None:
    """Under tensor parallelism it would be taken for padding."""
    given = None if labels is None else torch.tensor([labels])
    batch = Own(torch.tensor([ids]), labels=given, attention_mask=torch.ones(1, 2, dtype=torch.bool), media={})
    wrong = 9 if 9 in [*ids, *(labels or ())] else -1
    with pytest.raises(ValueError, match=rf"{wrong}, the embedding 9 rows"):
        step(1, mode=mode, vocabulary=9).prepare(batch, evaluate=True)
    if wrong == 9:
        step(1, mode=mode, vocabulary=10).prepare(batch, evaluate=True)
