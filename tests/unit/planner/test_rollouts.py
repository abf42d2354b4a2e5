"""A plan of reinforcement learning counts answers that are sampled, a frozen copy, and the rows that the answers fill."""

import pytest

from zoo.config.compose import load_recipe
from zoo.planner.activations import Row, rows_of_step
from zoo.planner.plan import plan
from zoo.planner.report import Plan, table
from zoo.planner.rollouts import answers_at_once


def planned(*overrides: str, ranks: int = 1) -> Plan:
    fixed = ["size=4b", "hardware=h200", "parallel.plan=[]", "packing.budget=8192", "rl.max_new_tokens=256"]
    return plan("qwen3_vl_grpo", ranks, overrides=[*fixed, *overrides])


def test_keys_and_values_of_all_answers_are_counted() -> None:
    """36 layers of 8 heads of 128 numbers in bf16, of keys and of values; one layer is held twice."""
    few = planned("rl.batch=32", "rl.samples=8")
    assert answers_at_once(few.recipe, few.row, 1) == (32, 2048 + 256)
    logits = 32 * 2 * 151936 * 4
    assert few.rollout == 32 * 2304 * 37 * 2 * 8 * 128 * 2 + logits
    assert "32 answers at once, of 2304 tokens" in table(few) and few.as_dict()["rollout_bytes"] == few.rollout
    two = planned("rl.batch=32", "rl.samples=8", "parallel.tp=2", ranks=2)
    assert two.rollout == pytest.approx((few.rollout - logits) / 2 + logits)


@pytest.mark.parametrize("overrides", [["rl.rollout=vllm"], ["parallel.pp=2"], ["parallel.cp=2"]])
def test_where_no_cache_is_kept_none_is_counted(overrides: list[str]) -> None:
    assert planned(*overrides, ranks=2).rollout == 0
    assert plan("qwen3_vl_sft", 1, overrides=["size=4b", "hardware=h200"]).rollout == 0


def test_the_larger_of_cache_and_activations_counts() -> None:
    long = ["engine.recompute=full", "rl.max_new_tokens=4096", "train.global_batch=64"]
    none = planned(*long, "rl.rollout=vllm").worst.activations
    small, large, larger = (planned(*long, f"rl.batch={batch}") for batch in (1, 64, 128))
    assert small.worst.activations == none > small.rollout
    assert large.worst.activations > none
    assert larger.worst.activations - large.worst.activations == pytest.approx(larger.rollout - large.rollout)


def test_a_frozen_copy_is_in_memory() -> None:
    without, with_copy = planned(), planned("rl.kl=0.05")
    assert with_copy.worst.weights == 2 * without.worst.weights
    adapted = [planned("lora.rank=8", *kl).worst.weights for kl in ([], ["rl.kl=0.05"])]
    assert adapted[0] == adapted[1]


def test_rows_of_a_step_are_those_that_answers_fill() -> None:
    row = Row((2048,) * 4, 1000, {})
    recipe = load_recipe("qwen3_vl_grpo", ["train.global_batch=32", "rl.samples=8", "rl.updates=2"])
    assert rows_of_step(recipe, row) == 32 * 8 / 2 / 4
    assert rows_of_step(load_recipe("qwen3_vl_sft", ["train.global_batch=32"]), row) == 32
