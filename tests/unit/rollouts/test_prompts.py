"""Prompts of a run: their order, rows that can't be used, and a position to go on from."""

from collections import Counter
from typing import Any

import pytest

from zoo.config.compose import load_recipe
from zoo.config.validate import validate
from zoo.data.loading.lengths import OneRank
from zoo.data.loading.sample_source import SampleSource
from zoo.errors import UserError
from zoo.generation.prompts import most_positions
from zoo.model import build
from zoo.rollouts.prompts import PromptStream

ITEMS = [
    {"messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": str(n)}]} for n in range(5)
]
LONG = {"messages": [{"role": "user", "content": "Say it. " * 200}], "answers": ["it", "that"]}


def stream(rows: list[dict[str, Any]], *overrides: str) -> PromptStream:
    fixed = ["size=tiny", "hardware=cpu", "packing.budget=256", "rl.max_new_tokens=8", "data.overlong=drop"]
    recipe = validate(load_recipe("qwen3_vl_grpo", [*fixed, *overrides]).replace({"data.train": rows}), 1)
    assembly = build.assemble(recipe)
    source = SampleSource.open(recipe.data.train, assembly.processor, recipe.data, budget=256)
    return PromptStream(source, recipe, OneRank(), most=most_positions(assembly.config))


def asked(prompts: dict[int, Any]) -> list[tuple[int, str]]:
    return [(number, prompt.row.messages[-1].content) for number, prompt in prompts.items() if prompt is not None]


def test_prompts_go_on_over_epochs_in_a_new_order_each() -> None:
    prompts = stream(ITEMS)
    taken = asked(prompts.take(10, 0, 1))
    assert [number for number, _ in taken] == list(range(10))
    first, second = [text for _, text in taken[:5]], [text for _, text in taken[5:]]
    assert sorted(first) == sorted(second) and first != second
    assert Counter(first) == Counter(f"Say {n}." for n in range(5))


def test_a_replica_encodes_its_share_and_all_draw_the_same() -> None:
    every = asked(stream(ITEMS).take(4, 0, 1))
    shares = [asked(stream(ITEMS).take(4, replica, 2)) for replica in range(2)]
    assert shares == [every[::2], every[1::2]]


def test_the_last_answer_is_left_out_and_compared_with() -> None:
    (prompt,) = stream(ITEMS[:1]).take(1, 0, 1).values()
    assert prompt is not None and prompt.row.answers == ("0",)
    assert [message.role for message in prompt.row.messages] == ["user"]
    assert prompt.sample.num_labels == 0


def test_a_row_that_has_no_room_for_an_answer_is_left_out_and_another_drawn() -> None:
    prompts = stream([*ITEMS[:2], LONG])
    taken = asked(prompts.take(4, 0, 1))
    assert len(taken) == 4 and all("it" not in text for _, text in taken)
    assert prompts.source.counts == Counter({"overlong": 1})
    with pytest.raises(UserError, match="no row can be used as a prompt"):
        stream([LONG]).take(1, 0, 1)


def test_a_stream_goes_on_from_a_saved_position() -> None:
    whole, begun, resumed = stream(ITEMS), stream(ITEMS), stream(ITEMS)
    wanted = asked(whole.take(9, 0, 1))
    assert asked(begun.take(3, 0, 1)) == wanted[:3]
    resumed.load_state_dict(begun.state_dict())
    assert asked(resumed.take(6, 0, 1)) == wanted[3:]
