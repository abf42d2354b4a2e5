"""What `zoo eval` makes of its arguments, and its table."""

import pytest

from zoo.cli.checkpoints.eval import run, split, table, wrong
from zoo.errors import UserError
from zoo.generation.scores.choose import Scores
from zoo.tools.evaluate import summed


def test_places_overrides_and_options() -> None:
    places, overrides, values, as_json = split(
        ["runs/a", "rows=b.jsonl", "metrics=[anls, wer]", "--parallel.tp=2", "batch=3", "--json"]
    )
    assert (places, overrides, as_json) == (["runs/a", "b.jsonl"], ["parallel.tp=2"], True)
    assert values == {"metrics": ["anls", "wer"], "batch": 3}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "0 of CHECKPOINT and ROWS"),
        (["a", "b", "batch=0"], "batch=0: wanted a whole number"),
        (["nowhere", "digits:heldout"], "nowhere: no such folder"),
        (["nowhere", "digits:heldout", "metrics=anl"], "nearest: anls"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(arguments)


def row(kind: str, said: str | None, answer: str | None, media: list[str], loss: float, weight: float) -> dict:
    return {
        "source": f"{kind}:1", "kind": kind, "task": None, "media": media, "prompt": "?", "answer": answer, "answers": [answer or ""],
        "prediction": said, "finish": "stop", "loss": loss, "loss_weight": weight,
    }  # fmt: skip


def test_sums_over_rows_and_the_table() -> None:
    rows = [
        row("clip", "one too", "one two", ["audio"], 1.0, 2.0),
        row("clip", "three", "three", ["audio"], 0.5, 1.0),
        row("photo", "Red", "red", ["image"], 2.0, 1.0),
        row("page", None, None, [], 4.0, 4.0),
    ]
    found = summed(rows, Scores.named([]))
    assert found.rows == 4 and found.loss == pytest.approx((2 + 0.5 + 2 + 16) / 8)
    assert found.scores == {
        "exact_match": pytest.approx(1 / 3), "wer": pytest.approx(1 / 3), "accuracy": 1.0, "anls": 1.0,
    }  # fmt: skip
    assert found.by_kind["clip"]["wer"] == pytest.approx(1 / 3)
    assert found.by_kind["page"] == {"rows": 1, "loss": 4.0}
    first, *lines = table(found).splitlines()
    assert first.split() == [
        "kind", "rows", "loss", "exact", "match", "WER", "(lower", "is", "better)", "accuracy", "ANLS",
    ]  # fmt: skip
    assert lines[-1].split() == ["all", "4", "2.5625", "33.3%", "33.3%", "100.0%", "100.0%"]
    assert wrong(found)[1] == "  clip:1: 'one too', wanted 'one two'"
