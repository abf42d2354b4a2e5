"""A plan of rollouts by vLLM counts its weights, its cache, and what of zoo stays on the GPU beside it."""

import pytest

from zoo.planner.plan import plan
from zoo.planner.report import Plan, table
from zoo.planner.vllm import WORK


def planned(*overrides: str, ranks: int = 1, hardware: str = "h200") -> Plan:
    fixed = ["size=4b", f"hardware={hardware}", "parallel.plan=[]", "packing.budget=8192", "rl.max_new_tokens=256"]
    return plan("qwen3_vl_grpo", ranks, overrides=[*fixed, "rl.rollout=vllm", *overrides])


def test_weights_and_cache_fill_vllms_share() -> None:
    """36 layers of 8 heads of 128 numbers in bf16, of keys and of values."""
    one = planned("rl.vllm.memory=0.4")
    assert one.vllm is not None and one.vllm.share == 0.4 * 141e9
    assert one.vllm.weights == 2 * sum(one.parameters.values())
    assert one.vllm.cache == pytest.approx(one.vllm.share - one.vllm.weights - WORK)
    assert one.vllm.tokens == one.row.longest + 256
    assert one.vllm.answers == int(one.vllm.cache / (one.vllm.tokens * 36 * 2 * 8 * 128 * 2))
    text = " ".join(table(one).split())
    assert f"vLLM 56.4 GB (weights {one.vllm.weights / 1e9:.1f}, cache" in text and "on the host then" in text
    assert one.as_dict()["vllm"]["answers"] == one.vllm.answers
    two = planned("rl.vllm.memory=0.4", "rl.vllm.tensor_parallel=2", ranks=2).vllm
    assert two is not None and two.weights == one.vllm.weights / 2 and two.answers > 2 * one.vllm.answers


def test_what_sleeps_takes_the_place_of_gradients_and_state() -> None:
    small, large = planned("rl.vllm.memory=0.1"), planned("rl.vllm.memory=0.9")
    without = planned("rl.rollout=zoo", "rl.batch=1").worst
    assert small.worst.activations == without.activations
    assert large.worst.total == pytest.approx(without.weights + 0.9 * 141e9)
    kept = planned("rl.vllm.memory=0.1", "rl.vllm.sleep=false").worst
    assert kept.total == pytest.approx(without.total + 0.1 * 141e9)
    assert small.host == pytest.approx(planned("rl.vllm.memory=0.1", "rl.vllm.sleep=false").host + without.optimizer)


@pytest.mark.parametrize(
    ("overrides", "hardware", "fits"),
    [
        (["rl.vllm.memory=0.4"], "h200", True),
        (["rl.vllm.memory=0.05"], "h200", False),  # weights alone take more
        (["rl.vllm.memory=0.95"], "h200", False),  # with zoo's weights beside it
        (["rl.vllm.memory=0.3", "rl.vllm.sleep=false"], "1x80gb", False),
    ],
)
def test_a_share_that_is_too_small_or_too_large_does_not_fit(overrides: list[str], hardware: str, fits: bool) -> None:
    assert planned(*overrides, hardware=hardware).fits is fits
