"""Model cards: valid front matter, what is known and nothing of this machine, and lines that load the model."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import zoo
from zoo.checkpoint import model_card
from zoo.config.locate import look

ARCH = {"architectures": ["Qwen3VLForConditionalGeneration"]}


def head(text: str) -> dict[str, Any]:
    found = yaml.safe_load(text.split("---\n")[1])
    assert isinstance(found, dict)
    return found


def code(text: str) -> str:
    (block,) = re.findall(r"```python\n(.*?)```", text, re.S)
    ast.parse(block)
    return str(block)


def hub(folder: Path) -> Path:
    """A model as the hub's cache has it."""
    place = folder / "models--Qwen--Qwen3-VL-4B-Instruct" / "snapshots" / "0123"
    place.mkdir(parents=True)
    (place / "config.json").write_text("{}")
    (place / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    return place


def test_of_a_run_on_a_model_of_the_hub(tmp_path: Path) -> None:
    recipe = zoo.load_recipe("qwen3_vl_sft", ["size=tiny", f"data.train={tmp_path}/mine.jsonl", "train.lr=3e-5"])
    text = model_card.trained(recipe, 7, look(str(hub(tmp_path))), ARCH)
    assert head(text) == {
        "library_name": "transformers",
        "base_model": "Qwen/Qwen3-VL-4B-Instruct",
        "license": "apache-2.0",
        "tags": ["zoo"],
    }
    version = f"zoo {zoo.__version__}"
    for told in ("mine.jsonl", "qwen3_vl_sft, size tiny", "| steps | 7 |", "3e-05", version, "apache-2.0"):
        assert told in text
    assert str(tmp_path) not in text
    assert "Qwen3VLForConditionalGeneration.from_pretrained" in code(text)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([], "cosine to 1e-06"),
        (["train.schedule=constant"], "constant"),
        (["train.schedule=wsd"], "stable, linear to 1e-06 in the last tenth"),
        (["train.schedule=wsd", "train.decay_steps=3"], "stable, linear to 1e-06 in the last 3 steps"),
    ],
)
def test_the_schedule_is_told(given: list[str], told: str) -> None:
    floor = [] if given == ["train.schedule=constant"] else ["train.min_lr=1e-6"]
    keys = ["size=tiny", "train.lr=3e-5", *floor, "train.warmup_steps=4", *given]
    text = model_card.trained(zoo.load_recipe("qwen3_vl_sft", keys), 7, None, ARCH)
    assert f"| 3e-05, 4 steps of warm-up, {told} |" in text


def test_of_adapters_and_of_random_weights() -> None:
    recipe = zoo.load_recipe("qwen3_vl_lora", ["size=tiny"])
    text = model_card.trained(recipe, 7, None, ARCH, adapter=True)
    assert head(text)["library_name"] == "peft" and "PeftModel.from_pretrained" in code(text)
    assert "none: training began from random weights" in text and "rank" in text and "base_model" not in head(text)


@pytest.mark.parametrize("adapter", [True, False])
@pytest.mark.parametrize(
    ("kind", "of_tokens", "made"),
    [
        ("qwen3", "Qwen3ForCausalLM", ""),
        ("qwen3_vl", "Qwen3VLForConditionalGeneration", "Qwen3VLPreTrainedModel"),
        ("qwen3_omni_moe", "Qwen3OmniMoeForConditionalGeneration", None),
    ],
)
def test_of_reward_models(kind: str, of_tokens: str, made: str | None, adapter: bool) -> None:
    """Its class is transformers' own, or made of the generic one; Omni's thinker has neither."""
    recipe = zoo.load_recipe("qwen3_vl_reward", ["size=tiny", f"lora.rank={8 * adapter}"])
    arch = {"architectures": [of_tokens], "model_type": kind}
    text = model_card.trained(recipe, 7, None, arch, adapter=adapter)
    if made is None:
        assert "## Use" not in text
        return
    block = code(text)
    name = of_tokens.partition("For")[0] + "ForSequenceClassification"
    exec(block.partition("model = ")[0], found := {})  # imports, and the class
    assert found[name].__name__ == name and f"{name}.from_pretrained" in block
    assert ("num_labels=1" in block) == ("PeftModel.from_pretrained" in block) == adapter
    assert (made in block) and "generate" not in block


def test_generate_is_given_the_end_where_it_has_one_of_its_own() -> None:
    text = model_card.untrained(None, {"architectures": ["Qwen3OmniMoeForConditionalGeneration"]})
    assert "thinker_eos_token_id=processor.tokenizer.eos_token_id" in code(text)
    taught = {"<|im_end|>": 151645, "<|endoftext|>": 151643}
    for name in ("Qwen3OmniMoe", "Qwen2_5Omni"):
        arch = {"architectures": [f"{name}ForConditionalGeneration"]}
        text = model_card.trained(None, 7, None, arch, ends=taught)
        assert "(**inputs, max_new_tokens=100, thinker_eos_token_id=[151645, 151643])" in code(text)


@pytest.mark.parametrize("adapter", [True, False])
def test_the_ends_that_training_taught_are_told(adapter: bool) -> None:
    """A base model's generation_config.json does not have them, and an adapter is put onto the base model."""
    text = model_card.trained(None, 7, None, ARCH, adapter=adapter, ends={"<|im_end|>": 151645})
    assert "| answers end at | " in text and "(151645)" in text
    assert ("eos_token_id=[151645]" in code(text)) == adapter


@pytest.mark.parametrize("name", ["x\n---\n# evil", "a/b\nlicense: mit", "<script>", "a/b/c", 3, None, ["x"]])
def test_names_of_strangers_stay_in_their_cells(tmp_path: Path, name: Any) -> None:
    (tmp_path / "zoo.json").write_text(json.dumps({"format": 2, "source": name}))
    (tmp_path / "hf").mkdir()
    arch = {"architectures": ["import os; x"]}
    text = model_card.converted(look(str(tmp_path)), arch, {})  # type: ignore[arg-type]
    assert head(text) == {"library_name": "transformers", "tags": ["zoo"]}
    assert "\n# evil" not in text and "<script>" not in text.replace("\\<", "") and "import os; x" not in text


def test_a_conversion_remembers_where_it_came_from(tmp_path: Path) -> None:
    place = look(str(hub(tmp_path)))
    assert place is not None
    assert model_card.name_of(place, "Qwen/Qwen3-VL-4B-Instruct") == "Qwen/Qwen3-VL-4B-Instruct"
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_text("{}")
    plain = look(str(tmp_path / "plain"))
    assert plain is not None and model_card.name_of(plain, f"{tmp_path}/plain/") == "plain"
    text = model_card.converted(place, ARCH, {"cast to": "bfloat16"}, native=True)
    assert "cast to" in text and "model.init" in text and "library_name" not in head(text)
