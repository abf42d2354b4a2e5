"""Which tokens are taken, and where an answer ends."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from zoo.errors import UserError
from zoo.generation.sampling import Answers, Sampling, end_tokens

LOGITS = torch.tensor([[0.1, 2.0, 1.9, -1.0], [3.0, 0.0, 0.0, 0.0]])


def test_draws_follow_the_probabilities_and_stay_within_top_p() -> None:
    assert Sampling().choose(LOGITS, [0, 1], 0) == [1, 0], "greedy takes the most likely"
    drawn = [Sampling(temperature=1.0).choose(LOGITS[:1], [row], 0)[0] for row in range(2000)]
    shares = torch.tensor(drawn).bincount(minlength=4) / 2000
    assert torch.allclose(shares, torch.softmax(LOGITS[0], -1), atol=0.04)
    kept = {Sampling(temperature=1.0, top_p=0.5).choose(LOGITS[:1], [row], 0)[0] for row in range(200)}
    assert kept == {1, 2}, "the first alone reaches 0.45"
    assert {Sampling(temperature=1.0, top_p=0.01).choose(LOGITS[:1], [row], 0)[0] for row in range(50)} == {1}


def test_a_draw_depends_on_seed_row_and_step_alone() -> None:
    flat = torch.zeros(3, 1000)
    together = Sampling(temperature=1.0, seed=7).choose(flat, [4, 5, 6], 2)
    assert [Sampling(temperature=1.0, seed=7).choose(flat[:1], [row], 2)[0] for row in (4, 5, 6)] == together
    assert len(set(together)) == 3
    assert Sampling(temperature=1.0, seed=8).choose(flat, [4, 5, 6], 2) != together
    assert Sampling(temperature=1.0, seed=7).choose(flat, [4, 5, 6], 3) != together
    assert len(Sampling(temperature=1.0, seed=2**32 - 1).choose(flat, [4, 5, 6], 2)) == 3


@pytest.mark.parametrize(
    ("name", "value"), [("max_new_tokens", 0), ("temperature", -1), ("top_p", 0), ("top_p", 1.5), ("seed", -1)]
)
def test_values_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(UserError, match=f"{name}={value}"):
        Sampling(**{name: value})


def test_answers_end_at_an_end_token_or_at_their_limit() -> None:
    answers = Answers([3, 1, 2], {9})
    for picks in ((1, 2, 9), (9, 5, 5), (4, 4, 4)):
        for number, token in enumerate(picks):
            answers.add(number, token)
    assert answers.tokens == [[1, 9], [2], [9]]
    assert not answers.growing


@pytest.mark.parametrize(("given", "wanted"), [(5, {5, 3}), ([5, 6], {5, 6, 3}), (None, {3})])
def test_end_tokens_are_the_files_and_that_of_training(given: object, wanted: set, tmp_path: Path) -> None:
    processor = SimpleNamespace(ends={"<end>": 3})
    assert end_tokens(None, processor) == end_tokens(tmp_path, processor) == {3}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
    assert end_tokens(tmp_path, processor) == wanted
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "<end>"}')
    with pytest.raises(UserError, match="eos_token_id is '<end>'"):
        end_tokens(tmp_path, processor)
