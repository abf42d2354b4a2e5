"""A teacher's tokens on disk come back row by row; damage, gaps and what does not fit are refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from zoo.config.derived import teacher_on_disk
from zoo.config.schema import DistillConfig, Recipe
from zoo.data.errors import RowError
from zoo.data.loading.batches import make_batch
from zoo.data.sample import Sample, with_teacher_logits
from zoo.errors import UserError
from zoo.training.distillation import token_files
from zoo.training.distillation.token_files import RowTokens, TokenReader, TokenWriter

VOCABULARY, K = 50, 6
LABELS = (3, 1, 4, 2, 5)


def row(number: int) -> RowTokens:
    logits = torch.randn(LABELS[number], VOCABULARY, generator=torch.Generator().manual_seed(number))
    top, ids = logits.log_softmax(-1).topk(K)
    rest = torch.log1p(-top.exp().sum(-1))
    return RowTokens(bytes([7 * number % 5] * 16), *(one.numpy() for one in (ids, top, rest)))


def sample(number: int) -> Sample:
    labels = torch.full((10,), -100)
    labels[0] = labels[-LABELS[number] :] = 1  # the first token is nobody's target
    return Sample(torch.ones(10, dtype=torch.long), labels, source=f"row {number}")


def made_by(**other: Any) -> dict[str, Any]:
    known = {"top_k": K, "temperature": 2.0, "vocabulary": VOCABULARY, "model": "m", "data": "d", "rows": 5}
    return known | other


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three files of two rows."""
    monkeypatch.setattr(token_files, "ROWS", 2)
    writer = TokenWriter(tmp_path / "spoken", made_by())
    for number in range(writer.count):
        writer.write(number, [row(n) for n in range(2 * number, min(2 * number + 2, 5))])
    return tmp_path / "spoken"


def reader(folder: Path, top_k: int = K, temperature: float = 2.0) -> TokenReader:
    return TokenReader(str(folder), DistillConfig(top_k=top_k, temperature=temperature), VOCABULARY)


def test_every_row_comes_back_with_fewer_tokens_too(folder: Path) -> None:
    for place, is_one in ((folder, True), (folder.parent, False)):
        assert teacher_on_disk(Recipe(distill=DistillConfig(teacher=str(place)))) is is_one
    whole, fewer = reader(folder), reader(folder, top_k=2)
    for number in (4, 0, 2, 1, 3):
        wanted = row(number)
        found, cut = (one.find(wanted.digest, sample(number)) for one in (whole, fewer))
        for one, other in zip(found[:3], wanted[1:], strict=True):
            np.testing.assert_array_equal(one, other)
        torch.testing.assert_close(cut.ids, found.ids[:, :2], rtol=0, atol=0)
        assert cut.places is None
        mass = cut.logprobs.exp().sum(1) + cut.rest.exp()
        torch.testing.assert_close(mass, torch.ones(LABELS[number]))


@pytest.mark.parametrize("mode", ["thd", "none"])
def test_a_micro_batch_knows_the_places_of_its_labels(folder: Path, mode: str) -> None:
    found = reader(folder)
    samples = [replace(sample(n), taught=found.find(row(n).digest, sample(n))) for n in (1, 4, 0)]
    batch = make_batch(samples, mode, 4, None, 0)
    assert batch.taught is not None and batch.taught.places is not None
    flat = batch.labels.flatten()
    flat[batch.starts] = -100
    torch.testing.assert_close(batch.taught.places, (flat != -100).nonzero()[:, 0], rtol=0, atol=0)
    np.testing.assert_array_equal(batch.taught.rest, np.concatenate([row(n).rest for n in (1, 4, 0)]))
    plain = [sample(1)]
    assert with_teacher_logits(batch, plain) is batch


def test_a_folder_left_half_way_goes_on(folder: Path) -> None:
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    (folder / names[1]).write_bytes(b"x" * (folder / names[1]).stat().st_size)
    with pytest.raises(UserError, match="missing or damaged"):
        reader(folder)
    writer = TokenWriter(folder, made_by())
    assert [writer.has(number) for number in range(3)] == [True, False, True]
    writer.write(1, [row(2), row(3)])
    assert len(reader(folder).keys) == 5
    index = json.loads((folder / token_files.INDEX).read_text())
    del index["files"][names[2]]
    (folder / token_files.INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match="2 of 3 files"):
        reader(folder)
    with pytest.raises(UserError, match="of another model and rows"):
        TokenWriter(folder, made_by(model="other", rows=6))
    TokenWriter(folder / "empty", made_by(rows=1)).write(0, [])  # all rows were bad
    assert len(reader(folder / "empty").keys) == 0


def test_what_does_not_fit_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="set that to 6 or less"):
        reader(folder, top_k=7)
    with pytest.raises(UserError, match="temperature 2,"):
        reader(folder, temperature=1.0)
    with pytest.raises(UserError, match="a vocabulary of 50 tokens"):
        TokenReader(str(folder), DistillConfig(top_k=2, temperature=2.0), 51)
    found = reader(folder)
    with pytest.raises(RowError, match="has no teacher's tokens of this row"):
        found.find(b"?" * 16, sample(0))
    with pytest.raises(RowError, match="damaged in this row"):
        found.find(row(2).digest, sample(3))
    file = folder / "tokens-000000.safetensors"
    raw = bytearray(file.read_bytes())
    place = raw.find(row(0).rest.tobytes())
    raw[place] ^= 1
    file.write_bytes(raw)
    with pytest.raises(RowError, match="damaged in this row"):
        reader(folder).find(row(0).digest, sample(0))
    assert reader(folder).find(row(1).digest, sample(1)).rest.shape == (1,)
