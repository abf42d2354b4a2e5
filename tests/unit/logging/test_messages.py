"""What a run says of the checkpoint that it resumes from."""

from zoo.config.resume import Change
from zoo.logging.messages import at_change


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
