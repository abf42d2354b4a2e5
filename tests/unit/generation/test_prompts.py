"""What of a row is its prompt."""

from typing import Any

import pytest
import torch

from zoo.config.schema import DataConfig
from zoo.data.errors import RowError
from zoo.data.sample import IGNORE, Sample
from zoo.data.sources.rows import Message, Row
from zoo.generation.prompts import make_prompt

USER, ANSWER, TOOL = Message("user", "Why?"), Message("assistant", "So."), Message("tool", "7")
CALL = Message("assistant", "")


class Recorder:
    """Encodes any row as three tokens and a labelled fourth, and keeps the row."""

    modalities = ("text",)

    def encode(self, row: Row, **options: Any) -> Sample:
        assert options["labels"] == "last"
        assert not row.calls or len(row.calls) == len(row.messages), "as chat templates are given them"
        self.row = row
        ids = torch.arange(4)
        return Sample(ids, torch.where(ids == 3, ids, IGNORE), {}, None, row.source)


@pytest.mark.parametrize(
    ("row", "messages", "reference"),
    [
        (Row((USER, ANSWER)), 2, "So."),
        (Row((USER, ANSWER), weights=(1.0, 0.0), weight=0.0), 2, "So."),
        (Row((USER, ANSWER, USER)), 4, None),
        (Row((USER, CALL, TOOL), calls=("", "[]", "")), 4, None),
        (Row((USER, CALL, TOOL, ANSWER), calls=("", "[]", "", "")), 4, "So."),
    ],
)
def test_all_before_the_last_answer_is_the_prompt(row: Row, messages: int, reference: str | None) -> None:
    processor = Recorder()
    prompt = make_prompt(processor, row, DataConfig(), most=10)  # type: ignore[arg-type]
    assert prompt.sample.input_ids.tolist() == [0, 1, 2]
    assert (len(processor.row.messages), prompt.reference) == (messages, reference)
    assert processor.row.weight == 1.0 and not processor.row.weights


@pytest.mark.parametrize(
    ("row", "most", "cause"),
    [
        (Row((), text="Once."), 10, "plain_text"),
        (Row((USER, ANSWER)), 3, "overlong"),
        (Row((USER, Message("assistant", "<image>"))), 10, "media_in_answer"),
    ],
)
def test_rows_without_a_prompt_are_refused(row: Row, most: int, cause: str) -> None:
    with pytest.raises(RowError) as error:
        make_prompt(Recorder(), row, DataConfig(), most=most)  # type: ignore[arg-type]
    assert error.value.cause == cause
