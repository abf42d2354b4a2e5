"""zoo plan, zoo list and zoo show, for people and for machines."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import zoo
from zoo.cli.main import main
from zoo.config.checks import engine
from zoo.config.compose import about
from zoo.config.files import CPU, size_names
from zoo.config.gpus import GPUS
from zoo.config.recipes.matrix import recipe_names, size_order
from zoo.errors import UserError
from zoo.registry import families

BIG = ["plan", "recipe=qwen3_vl_sft", "size=30b-a3b", "hardware=8xh200"]


def test_a_plan_for_hardware_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(BIG) == 0
    printed = capsys.readouterr().out
    assert "h200: 141 GB, 989.5 TFLOP/s in bf16, FlashAttention 4, FP8, measured: " in printed
    assert "8 ranks: " in printed and " fits" in printed and "31.07 B" in printed
    assert "  a save " in printed and "train.keep=2 and the one being written take " in printed
    assert main([*BIG, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True
    assert found["ranks"] == 8
    assert found["gpu"]["tflops"] == 989.5
    step = found["flops"]["step"]["total"]
    assert found["flops"]["seconds_of_a_step_at_peak"] == pytest.approx(step / (8 * 989.5e12))
    assert found["parameters"]["total"] == 31_070_754_032
    assert found["memory_bytes"][0]["total"] < found["room_bytes"]
    assert found["parallel"]["ep"] > 1
    save = found["checkpoint_bytes"]
    assert 6 <= save["all"] / 31_070_754_032 <= 14 and save["disk"] == 3 * save["all"] + save["export"]
    assert save["export"] == 2 * 31_070_754_032 and found["host_bytes"]["optimizer"] == 0
    assert save["rank"] == save["host_memory_of_rank"] == -(-save["all"] // 8)


def test_a_run_that_saves_at_its_end_alone_has_one_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    more = ["train.save_every=0", "train.save=weights", "export=false"]
    assert main([*BIG, *more]) == 0
    assert "the one at the run's end takes 62.14 of the disk" in capsys.readouterr().out
    assert main([*BIG, *more, "--json"]) == 0
    save = json.loads(capsys.readouterr().out)["checkpoint_bytes"]
    assert save["disk"] == save["all"] == 2 * 31_070_754_032


@pytest.mark.slow
def test_a_plan_says_nothing_else() -> None:
    """No library's warnings: those of transformers about the keys of published configs, say."""
    command = [sys.executable, "-m", "zoo", "plan", "qwen3_omni_sft", "size=30b-a3b", "hardware=8xh200"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.startswith("qwen3_omni_sft  size 30b-a3b")


@pytest.mark.slow
def test_sizes_that_are_given_and_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BIG, "parallel.plan=[]"]) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out
    assert main(["plan", "recipe=qwen3_vl_sft", "size=235b-a22b", "hardware=1xh100"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("zoo: error: the model does not fit a GPU of 80 GB; 64 such GPUs (8 nodes of 8) would do")


def test_another_machine_is_planned_for_without_its_gpus_and_packages(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "gpu_count", lambda: 0)
    arguments = ["plan", "recipe=qwen3_vl_sft", "size=tiny", "engine.backend=te"]
    assert main([*arguments, "hardware=1xh200"]) == 0
    for here in ([], ["hardware=cpu"], ["hardware=auto"]):
        assert main([*arguments, *here]) == 2
        assert "Transformer Engine needs a GPU and none is here" in capsys.readouterr().err
    assert main(["plan", "recipe=qwen3_vl_sft", "size=2b", "hardware=1xa100", "engine.fp8=true"]) == 2
    assert "on Hopper (9.0) alone" in capsys.readouterr().err


def test_the_row_of_a_plan_is_as_told(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "recipe=qwen3_vl_sft", "size=tiny", "hardware=cpu", "nproc=1", "--json"]
    rows = {}
    for more in (["labels=0.5", "media=0"], []):
        assert main([*arguments, *more]) == 0
        rows[bool(more)] = json.loads(capsys.readouterr().out)
    assert rows[True]["row"]["labels"] == 512
    assert rows[True]["row"]["media_rows"]["vision"] == 0
    assert rows[True]["flops"]["step"]["vision"] == 0
    assert rows[False]["flops"]["step"]["vision"] > 0


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("ranks=0", "ranks=0: wanted a whole number above 0"),
        ("ranks=" + "9" * 5000, f"ranks={'9' * 133}...{'9' * 64}: wanted a whole number above 0"),
        ("labels=2", "labels=2: wanted a share between 0 and 1"),
        ("hardwre=cpu", "hardwre: no such key; nearest: hardware"),
        ("--jsn", "--jsn: no such option; nearest: --json"),
    ],
)
def test_mistakes(argument: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "recipe=qwen3_vl_sft", argument]) == 2
    assert capsys.readouterr().err == f"zoo: error: {message}\n"


def test_a_show_tells_what_was_changed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("base: qwen3_vl_sft\ntrain: {lr: 1.0e-4}\n", encoding="utf-8")
    arguments = ["show", f"recipe={mine}", "size=tiny", "hardware=cpu", "train.steps=7"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "# changed against qwen3_vl_sft size=tiny hardware=cpu:\n" in printed
    assert "#   train.lr: 0.0001 (was 0.0012)\n" in printed
    assert "#   train.steps: 7 (was 1800)\n" in printed
    (line,) = [line for line in printed.splitlines() if line.startswith("  warmup_steps:")]
    assert "# linear warm-up in updates" in line
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["changed"]) == {"train.lr", "train.steps"}
    assert found["changed"]["train.steps"] == {"value": 7, "base": 1800}
    assert found["recipe"]["train"]["lr"] == 1e-4


def test_a_list_fits_a_screen_and_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 120
    words = set(re.split(r"[\s,]+", "\n".join(lines)))
    assert {size for family in families() for size in size_names(family)} <= words
    assert {*families(), CPU, *GPUS} <= words
    for name in recipe_names():
        splits = [(name[:at], name[at + 1 :]) for at, sign in enumerate(name) if sign == "_"]
        assert name in words or any(set(split) <= words for split in splits), name


def test_a_name_lists_what_is_known_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    for family in families().values():
        assert main(["list", family.name]) == 0
        printed = capsys.readouterr().out
        assert all(part in printed for part in (family.title, *family.parts, " ".join(family.proved)))
        own = {name for name in recipe_names() if about(name)["family"] == family.name}
        assert own <= set(printed.split())
    for name, told in (("demo", about("demo")["description"]), ("h100", "80 GB"), ("recipes", "qwen3_vl_dpo_lora ")):
        assert main(["list", name]) == 0
        assert told in capsys.readouterr().out
    assert main(["list", "h100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hardware"]["h100"]["memory_gb"] == 80


@pytest.mark.parametrize(
    "names",
    [
        ["tiny", "tiny-moe", "270m", "0.8b", "1b", "4b", "12b", "27b", "30b-a3b", "235b-a22b"],
        ["tiny", "onevision-0.5b", "1.5-7b", "1.6-mistral-7b", "4.6-106b-a12b", "1.1t"],
    ],
)
def test_sizes_are_in_the_order_of_their_parameters(names: list[str]) -> None:
    assert sorted(reversed(names), key=size_order) == names


def test_lists_and_schema_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hardware"]["h200"]["memory_gb"] == 141
    assert found["recipes"]["qwen3_vl_sft"]["family"] == "qwen3_vl"
    assert main(["show", "--schema", "--json"]) == 0
    keys = {entry["key"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert keys["engine.recompute"]["choices"] == ["none", "selective", "full"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({name: share}, f"^{name}=.*: wanted a share") for name in ("labels", "media") for share in (3.0, -0.1, math.nan, True, "0.5")),
        *(({"ranks": ranks}, "^ranks=.*: wanted a whole number above 0") for ranks in (0, -1, 1.5, True, "2", 10**30)),
    ],
)  # fmt: skip
def test_shares_and_ranks_from_python(options: dict[str, Any], message: str) -> None:
    recipe = zoo.load_recipe("qwen3_sft", ["size=tiny", "hardware=cpu"])
    with pytest.raises(UserError, match=message):
        zoo.plan(recipe, **{"ranks": 1, **options})
