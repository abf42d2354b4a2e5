"""Keys of an architecture stand in the part that has them; elsewhere nothing would read them."""

import pytest

from zoo.config.compose import load_recipe
from zoo.config.files import root_recipes
from zoo.errors import UserError
from zoo.registry import get_family

PARTS = ("text_config.", "vision_config.", "audio_config.", "thinker_config.", "thinker_config.text_config.", "")
BASES = [name for name in root_recipes() if name.endswith("_sft")]


@pytest.mark.parametrize(
    ("recipe", "given", "wanted"),
    [
        ("qwen3_sft", "text_config.hidden_size", "hidden_size"),
        ("qwen3_vl_sft", "hidden_size", "text_config.hidden_size"),
        ("qwen3_vl_sft", "depth", "vision_config.depth"),
        ("qwen3_vl_sft", "thinker_config.text_config.vocab_size", "text_config.vocab_size"),
        ("qwen3_omni_sft", "text_config.hidden_size", "thinker_config.text_config.hidden_size"),
        ("qwen3_omni_sft", "num_hidden_layers", "thinker_config.text_config.num_hidden_layers"),
    ],
)
def test_a_key_in_another_part_is_refused_with_its_place(recipe: str, given: str, wanted: str) -> None:
    with pytest.raises(UserError, match=f"^model.arch.{given}: no such key; nearest: .*model.arch.{wanted}"):
        load_recipe(recipe, ["size=tiny", f"model.arch.{given}=64"])


def test_keys_that_nothing_is_known_of_pass() -> None:
    for key in ("initializer_range=0.1", "vision_config.initializer_range=0.1", "pad_token_id=3", "note=x"):
        load_recipe("qwen3_vl_sft", ["size=tiny", f"model.arch.{key}"])


@pytest.mark.parametrize("recipe", BASES)
def test_parts_that_a_family_has_not_end_in_one_sentence(recipe: str) -> None:
    for part in PARTS:
        for key, value in (("hidden_size", "64"), ("d_model", "3"), ("num_heads", "[1]"), ("foo", "{a: 1}")):
            try:
                model = load_recipe(recipe, ["size=tiny", f"model.arch.{part}{key}={value}"]).model
                get_family(str(model.family)).load("config").from_arch(model.arch)
            except UserError as error:
                assert "\n" not in str(error)
