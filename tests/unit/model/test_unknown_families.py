"""What is said of a config.json that no family reads."""

import pytest

from zoo.errors import UserError
from zoo.model.meta_model import family_of
from zoo.registry import get_family


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("qwen3_5_mo", "no family has it; nearest: qwen3_5_moe, .*docs/add-a-family.md says how to add one"),
        ("bert\n", r"model_type 'bert.*': no family has it; wanted one of .*qwen3_asr"),
        (None, "no family has it"),
        ("qwen4_exp", "can't be trained here: it has four residual streams .* which zoo's decoder has not"),
        ("glm4v", "can't be trained here: it has a rotary embedding of neighbouring channels"),
    ],
)
def test_an_unknown_model_type(kind: str | None, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        family_of({"model_type": kind} if kind else {})
    assert "\n" not in str(caught.value)


def test_a_family_says_the_same() -> None:
    with pytest.raises(UserError, match="'qwen4_exp' can't be trained here: it has four residual streams"):
        get_family("qwen35_vl").load("config").from_arch({"model_type": "qwen4_exp"})
