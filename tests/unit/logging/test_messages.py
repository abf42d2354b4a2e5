"""What a run says of the checkpoint that it resumes from."""

from zoo.config.resume import Change
from zoo.config.schema import Recipe
from zoo.logging.messages import at_batch, at_change


def test_a_batch_is_said_where_ranks_do_not_divide_it_or_became_others() -> None:
    recipe = Recipe().replace({"train.global_batch": 8})
    assert [*at_batch(recipe, 4, None), *at_batch(recipe, 4, 4)] == []
    assert [*at_batch(recipe, 2, 4)] == [
        "4 ranks became 2, and the batch stays: train.global_batch=8 is 4 micro-batches on each of 2 replicas"
    ]
    assert [*at_batch(recipe, 3, None)] == [
        "train.global_batch=8 is 3 micro-batches on each of 3 replicas, of which 1 of 9 only fill the step up and count nothing"
    ]
    staged = recipe.replace({"parallel.pp": 2, "parallel.vpp": 2, "train.global_batch": 3})
    assert "4 micro-batches on each of 1 replicas, of which 1 of 4" in next(at_batch(staged, 2, None))


def test_a_converted_optimizer_state_is_one_sentence() -> None:
    changes = [
        Change("train.lr", 1e-3, 1e-4),
        Change("train.exp_avg_dtype", "fp32", "fp8", free=True),
        Change("train.exp_avg_sq_dtype", "fp32", "bf16", free=True),
    ]
    allowed, converted = at_change(changes)
    assert "as allowed: train.lr" in allowed
    assert converted == (
        "the optimizer's state is converted to what this recipe holds: train.exp_avg_dtype: fp32 there, fp8 here; "
        "train.exp_avg_sq_dtype: fp32 there, bf16 here"
    )
    assert list(at_change([])) == []
