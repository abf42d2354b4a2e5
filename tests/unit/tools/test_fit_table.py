"""`zoo plan --table`: which published size fits which GPUs, in the cells that the planner gave when they were recorded."""

import json

import pytest

import zoo
from zoo.cli.main import main
from zoo.config.files import size_names
from zoo.registry import families
from zoo.tools.fit_table import line, sizes_of

# (recipe, size, kind of GPU) -> the cells for 1, 2, 4, 8 and 16 GPUs.
RECORDED = {
    ("qwen3_sft", "0.6b", "h100"): "24 | 21 | 19 | 19 | 18",
    ("gemma3_text_lora", "270m", "h100"): "10 | 10 | 10 | 10 | 10",
    ("qwen3_asr_sft", "0.6b", "h100"): "31 | 28 | 26 | 25 | 24",
    ("qwen3_moe_sft", "30b-a3b", "h100"): "- | - | - | 70 cp2 ep8 mr | 70 ep8 mr",
    ("qwen3_omni_sft", "30b-a3b", "h100"): "- | - | - | 70 cp2 ep8 mR | 66 ep8 mR",
    ("qwen3_vl_sft", "32b", "h200"): "- | - | 123 tp4 mr | 116 tp4 m | 112 tp4",
    ("qwen35_vl_lora", "9b", "h100"): "52 r | 47 cp2 | 47 cp2 | 47 cp2 | 47 cp2",
    ("qwen35_text_sft", "9b", "h100"): "- | 71 tp2 mr | 67 tp2 m | 64 tp2 | 59 tp2",
    ("qwen35_text_moe_lora", "25b-a3b", "h200"): "109 | 84 ep2 | 83 ep2 | 82 ep2 | 82 ep2",
    ("llava_onevision_lora", "onevision-0.5b", "h200"): "27 | 27 | 27 | 27 | 27",
    ("qwen3_vl_moe_lora", "30b-a3b", "h200"): "119 | 87 ep2 | 86 ep2 | 86 ep2 | 86 ep2",
    ("gemma3_sft", "4b", "h200"): "129 mr | 125 r | 128 m | 127 | 124",
    ("gemma4_lora", "31b", "h200"): "75 R | 119 tp2 | 118 tp2 | 118 tp2 | 118 tp2",
    ("internvl_sft", "8b", "h100"): "- | 72 tp2 mR | 72 tp2 cp2 m | 69 tp2 cp2 | 64 tp2 cp2",
    ("glm45v_lora", "4.5-106b-a12b", "h200"): "- | 127 ep2 R | 120 tp2 ep4 | 130 cp2 ep4 | 130 cp2 ep4",
    ("qwen25_omni_lora", "3b", "h100"): "45 | 45 | 45 | 45 | 45",
    ("qwen3_next_lora", "80b-a3b", "h200"): "- | 95 ep2 R | 118 ep4 | 116 ep4 | 116 ep4",
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("recipe", "size", "kind"), RECORDED)
def test_a_line_of_the_table(recipe: str, size: str, kind: str) -> None:
    assert " | ".join(map(str, line(recipe, size, kind))) == RECORDED[recipe, size, kind]


def test_the_command_prints_what_plans_of_each_machine_say(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--table", "recipe=qwen3_sft", "size=8b", "hardware=h100", "packing.budget=4096"]
    assert main([*arguments, "labels=0.5"]) == 0
    printed = capsys.readouterr().out
    assert "-: nothing fits" in printed and "\nh100, 80 GB\n" in printed
    cells = printed.splitlines()[-1].removeprefix("qwen3_sft 8b").split("  ")
    cells = [cell.strip() for cell in cells if cell.strip()]
    assert main([*arguments, "labels=0.5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [entry["gpus"] for entry in found] == [1, 2, 4, 8, 16]
    assert cells[0] == "-" and found[0]["bytes"] is None and found[0]["layout"] is None
    for entry, cell, hardware in zip(found[1:4], cells[1:4], ("2xh100", "4xh100", "8xh100"), strict=True):
        recipe = zoo.load_recipe("qwen3_sft", ["size=8b", f"hardware={hardware}", "packing.budget=4096"])
        plan = zoo.plan(recipe, labels=0.5)
        assert entry["bytes"] == pytest.approx(plan.worst.total) and cell.split()[0] == f"{entry['bytes'] / 1e9:.0f}"
        assert entry["layout"]["tp"] == plan.recipe.parallel.tp
        assert (f"tp{entry['layout']['tp']}" in cell) == (entry["layout"]["tp"] > 1)


@pytest.mark.parametrize(
    "named", [["qwen3_sft", "task=reward"], ["family=qwen3", "task=reward"], ["recipe=qwen3_reward"]]
)
def test_a_recipe_is_named_as_ever(named: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--table", *named, "size=0.6b", "hardware=h100"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("qwen3_reward 0.6b  ")


def test_every_published_size_has_a_line_with_all_weights_and_with_adapters() -> None:
    wanted = {(family, size) for family in families() for size in size_names(family) if "tiny" not in size}
    lines = sizes_of(None)
    assert len(lines) == len(set(lines)) == 2 * len(wanted)
    assert {(zoo.load_recipe(recipe, [f"size={size}"]).model.family, size) for recipe, size in lines} == wanted
    assert sizes_of("qwen3_vl_moe_dpo_lora") == [("qwen3_vl_moe_dpo_lora", size) for size in ("30b-a3b", "235b-a22b")]
    assert ("llava_onevision_sft", "onevision-0.5b") in lines and ("llava_sft", "1.6-mistral-7b") in lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hardware=8xh100"], "hardware=8xh100: --table counts the GPUs itself; name the kind: hardware=h100"),
        (["hardware=h10"], "hardware=h10: no such GPU; nearest: h100"),
        (["ranks=4"], "ranks=4: --table has 1 to 16 GPUs; leave it out"),
        (["recipe=qwen3_sft", "size=9b"], "size=9b: no published size of these recipes: 0.6b, 1.7b"),
        (["recipe=qwen3_sft", "size=0.6b", "trian.lr=1"], "trian.lr: no such key"),
        (["recipe=qwen3_sfx"], "recipe=qwen3_sfx: no such recipe"),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--table", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"zoo: error: {message}")
