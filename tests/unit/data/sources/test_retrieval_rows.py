"""Rows of query, positive and negatives: what they become, and what is wrong with those that lack a part."""

from pathlib import Path
from typing import Any

import pytest

from zoo.config.schema import EmbedConfig
from zoo.data.errors import RowError
from zoo.data.loading.pairs import conversations_of
from zoo.data.sources.references import Access
from zoo.data.sources.rows import Row, make_row


def made(item: dict[str, Any]) -> Row:
    return make_row(item, "rows.jsonl:1", Access(Path()))


def test_texts_messages_and_media() -> None:
    turns = [{"role": "system", "content": "You see."}, {"role": "user", "content": "<image>this one?"}]
    row = made({
        "query": {"messages": turns, "images": ["q.png"]}, "positive": {"images": ["a.png", "b.png"], "text": "two"},
        "negatives": ["no", {"image": "c.png"}], "instruction": "Find it", "kind": "pictures",
    })  # fmt: skip
    assert [message.content for message in row.messages] == ["You see.", "<image>this one?"] and row.prompt
    assert (row.kind, row.instruction, row.form) == ("pictures", "Find it", "retrieval")
    assert [candidate.messages[0].content for candidate in row.candidates] == ["<image><image>two", "no", "<image>"]
    assert row.files == ("q.png", "a.png", "b.png", "c.png") and row.media == {"image"}


@pytest.mark.parametrize(
    ("item", "wanted"),
    [
        ({"query": "what?", "negatives": ["no"]}, "'positive' is missing"),
        ({"positive": "yes"}, "'query' is missing"),
        ({"query": "what?", "positive": "yes", "negatives": "no"}, "'negatives' is"),
        ({"query": "what?", "positive": "yes", "negatives": [" "]}, "is empty"),
        ({"query": "what?", "positive": {"text": "a", "sound": "b"}}, "the key 'sound'"),
        ({"query": "what?", "positive": {"text": "<image>", "images": []}}, "in positive: 1 <image> in the messages"),
        ({"query": "what?", "positive": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "ends with an answer"),
        ({"query": "what?", "positive": "yes", "instruction": 3}, "'instruction' is"),
    ],
)  # fmt: skip
def test_a_row_that_lacks_a_part(item: dict[str, Any], wanted: str) -> None:
    with pytest.raises(RowError, match=r"rows.jsonl:1") as error:
        made(item)
    assert wanted in str(error.value) and "\n" not in str(error.value)


def test_instructions_stand_where_published_models_have_them() -> None:
    row = made({"query": "what?", "positive": "yes", "negatives": ["no"]})
    query, *others = conversations_of(row, EmbedConfig(instruction="Find it", template="chat"))
    assert query.messages == (("system", "Find it"), ("user", "what?")) and query.prompt
    assert [other.messages for other in others] == [(("user", "yes"),), (("user", "no"),)]
    query, *others = conversations_of(row, EmbedConfig(instruction="Find it", template="plain"))
    assert query.text == "Instruct: Find it\nQuery:what?" and [other.text for other in others] == ["yes", "no"]


def test_what_is_no_row_of_retrieval() -> None:
    turns = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "that"}]
    with pytest.raises(RowError, match="no query and positive"):
        conversations_of(made({"messages": turns}), EmbedConfig(template="chat"))
    seen = made({"query": "what?", "positive": {"image": "a.png"}})
    with pytest.raises(RowError, match="template=plain takes texts alone"):
        conversations_of(seen, EmbedConfig(template="plain"))
