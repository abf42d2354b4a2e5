"""Every published size on every machine: what is planned fits, and where nothing does, what is said would."""

import json
import re
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from zoo.config.compose import load_recipe
from zoo.config.derived import data_parallel, stage_layers
from zoo.config.files import size_names
from zoo.config.recipes.matrix import recipe_names
from zoo.config.schema import Recipe
from zoo.config.validate import validate
from zoo.errors import ConfigError
from zoo.planner.activations import Row, SavedActivations, rows_of_step, typical_row
from zoo.planner.layouts import candidates, capacity, choose_layout
from zoo.planner.memory import Model, memory, tower_weights
from zoo.planner.plan import choose_layout_here, model_of, plan, refuse_misfit
from zoo.planner.report import table

KINDS = ("h100", "h200")
COUNTS = ("1", "2", "4", "8", "2x8", "8x8")
FAMILIES = {
    "qwen3_vl", "qwen35_vl", "qwen3_omni", "llava", "qwen25_vl", "qwen3_asr", "qwen25_omni", "gemma3", "gemma3_text", "gemma4", "qwen3",
    "qwen3_next", "internvl", "glm45v", "qwen35_text",
}  # fmt: skip
SIZES = [(f"{name}_sft", size) for name in sorted(FAMILIES) for size in size_names(name) if "tiny" not in size]
SAID = re.compile(r"; (?:packing\.budget=(\d+))?(?: or )?(?:(\d+) such GPUs(?: \((\d+) nodes of 8\))?)? would do$")


@cache
def model(recipe: str, size: str) -> Model:
    return model_of(load_recipe(recipe, [f"size={size}"]))


def resolved(name: str, size: str, hardware: str, *more: str) -> tuple[Recipe, int]:
    recipe = load_recipe(name, [f"size={size}", f"hardware={hardware}", *more])
    assert recipe.machine.gpus is not None
    return recipe, recipe.machine.gpus * recipe.machine.nodes


@cache
def chosen_for(name: str, size: str, hardware: str, *more: str) -> Recipe:
    recipe, ranks = resolved(name, size, hardware, *more)
    return choose_layout(model(name, size), recipe, ranks, typical_row(recipe, model(name, size).cost))


def test_all_families_are_here() -> None:
    assert {load_recipe(name, ["size=tiny"]).model.family for name in recipe_names()} == FAMILIES


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), SIZES)
def test_a_size_on_every_machine(name: str, size: str) -> None:
    for hardware in (f"{count}x{kind}" for kind in KINDS for count in COUNTS):
        recipe, ranks = resolved(name, size, hardware)
        row = typical_row(recipe, model(name, size).cost)
        try:
            chosen = chosen_for(name, size, hardware)
        except ConfigError as error:
            match = SAID.search(str(error))
            assert match, error
            kind = hardware.rpartition("x")[2]
            if match[2]:
                would = f"{match[3]}x8x{kind}" if match[3] else f"{match[2]}x{kind}"
                assert chosen_for(name, size, would).parallel.plan == []
            if match[1]:
                assert chosen_for(name, size, hardware, f"packing.budget={match[1]}").parallel.plan == []
            continue
        assert validate(chosen, ranks).parallel.plan == []
        limit = capacity(chosen)
        stages = memory(model(name, size), chosen, row, ranks, fused=True)
        assert limit is not None and max(stage.total for stage in stages) <= limit
        assert chosen.train.global_batch % data_parallel(chosen, ranks) == 0


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("name", "size", "hardware"),
    [
        *product(["qwen3_vl_moe_sft", "qwen3_omni_sft"], ["30b-a3b"], ["8xh100", "4xh200"]),
        *product(["qwen35_vl_moe_sft"], ["35b-a3b"], ["8xh100", "4xh200"]),
        ("qwen3_vl_sft", "32b", "8xh100"),
        ("qwen3_vl_moe_sft", "235b-a22b", "4x8xh200"),
    ],
)
def test_published_models_fit_whole(name: str, size: str, hardware: str) -> None:
    """Full fine-tuning at full depth, of all parts."""
    chosen = chosen_for(name, size, hardware)
    ranks = resolved(name, size, hardware)[1]
    row = typical_row(chosen, model(name, size).cost)
    limit = capacity(chosen)
    assert limit is not None and not chosen.model.freeze and not chosen.lora.rank
    assert max(stage.total for stage in memory(model(name, size), chosen, row, ranks, fused=True)) <= limit


@pytest.mark.parametrize(
    ("hardware", "budget", "ep", "weights"), [("4xh200", 8192, 2, 36e9), ("4xh200", 16384, 1, 66e9), ("4xh100", 8192, 4, 19e9)]
)  # fmt: skip
def test_experts_are_shared_out_where_rows_are_short_or_memory_is_small(
    hardware: str, budget: int, ep: int, weights: float
) -> None:
    """Adapters in rows of 16,384 tokens were fastest with all experts on an H200, and faster under EP 2 than under EP 4."""
    chosen = chosen_for("qwen3_vl_moe_lora", "30b-a3b", hardware, f"packing.budget={budget}")
    assert (chosen.parallel.ep, chosen.parallel.cp, chosen.parallel.pp) == (ep, 1, 1)
    lora = model("qwen3_vl_moe_lora", "30b-a3b")
    assert memory(lora, chosen, typical_row(chosen, lora.cost), 4, fused=True)[0].weights < weights


@pytest.mark.parametrize(
    ("changes", "gb"),
    [
        ((), 2.139),  # 327,680 rows less the 81,920 of an even share, of 2,048 + 3 * 768 numbers in bf16
        (("parallel.ep=1",), 0.0),
        (("parallel.ep=8", "nproc=8", "train.global_batch=8"), 0.0),  # tokens go to some of the ranks
        (("lora.rank=8",), 0.0),
        (("engine.precision=fp32",), 0.0),
    ],
)
def test_memory_for_rows_that_may_come(changes: tuple[str, ...], gb: float) -> None:
    given = "parallel.plan=[]", "nproc=4", "parallel.ep=4", "engine.precision=bf16", "packing.budget=10240"
    recipe = load_recipe("qwen3_vl_moe_sft", ["size=30b-a3b", "hardware=8xh200", *given, *changes])
    text = model("qwen3_vl_moe_sft", "30b-a3b").text
    kept = SavedActivations(recipe, text, (), Row((10240,), 10240, {}), fused=True)
    assert kept.unused_rows() == pytest.approx(gb * 1e9, rel=0.02)


def test_measures_go_from_cheap_to_dear() -> None:
    given = ("parallel.tp=8", "parallel.pp=1", "parallel.cp=1")
    found = []
    for memory_gb in (140, 96, 80, 56):
        chosen = chosen_for("qwen3_vl_sft", "32b", "8xh200", *given, f"machine.memory_gb={memory_gb}")
        found.append((chosen.train.exp_avg_sq_dtype, chosen.engine.recompute))
    assert found[:3] == [("fp32", "none"), ("bf16", "none"), ("bf16", "selective")] and found[3][0] == "fp8"
    kept = chosen_for("qwen3_vl_sft", "32b", "8xh200", *given, "train.exp_avg_dtype=bf16")
    assert (kept.train.exp_avg_dtype, kept.train.exp_avg_sq_dtype) == ("bf16", "fp32")


@pytest.mark.slow
def test_the_host_holds_state_where_it_has_room() -> None:
    """An 8B model on one GPU of 80 GB: weights and gradients fit, AdamW's state does not."""
    given = ("qwen3_vl_sft", "8b", "1xh100", "packing.budget=4096")
    with pytest.raises(ConfigError, match="does not fit a GPU of 80 GB; "):
        chosen_for(*given)
    with pytest.raises(ConfigError, match="and the 64 GB of a node's host; "):
        chosen_for(*given, "machine.host_memory_gb=64")
    chosen = chosen_for(*given, "machine.host_memory_gb=512")
    share = chosen.train.optimizer_offload_fraction
    assert share > 0
    found = plan(validate(chosen, 1), 1)
    state = 12e9 if chosen.train.exp_avg_dtype == "fp8" else 30e9
    assert found.fits and state * share < max(stage.host for stage in found.stages) < found.host < 512e9
    assert {measure.name: measure.taken for measure in found.measures}["optimizer on the host"]
    assert any(line.startswith("  host ") and line.endswith("fits") for line in table(found).splitlines())
    roomy = chosen_for("qwen3_vl_sft", "8b", "8xh200", "machine.host_memory_gb=2000")
    assert roomy.train.optimizer_offload_fraction == 0


@pytest.mark.slow
def test_adapters_of_a_base_in_fewer_bits_fit_one_gpu() -> None:
    """30B-A3B on 80 GB in FP8 and on 48 in NF4, where bf16 weights leave room under full recompute alone."""
    given = ("qwen3_vl_moe_lora", "30b-a3b", "1xh100")
    chosen = chosen_for(*given, "lora.base_dtype=fp8")
    found = plan(validate(chosen, 1), 1)
    assert found.fits and chosen.engine.recompute == "selective"
    assert found.worst.weights == pytest.approx(33.354e9, rel=1e-3)  # the bytes of the model's tensors
    smaller = chosen_for("qwen3_vl_moe_lora", "30b-a3b", "1x48gb", "lora.base_dtype=nf4")
    found = plan(validate(smaller, 1), 1)
    assert found.fits and found.worst.weights == pytest.approx(18.42e9, rel=1e-3)
    dense = plan(validate(chosen.replace({"lora.base_dtype": "model"}), 1), 1)
    assert not dense.fits and dense.worst.weights == pytest.approx(62.8e9, rel=1e-3)


@pytest.mark.slow
def test_a_plan_says_what_each_measure_saves() -> None:
    recipe, ranks = resolved("qwen3_vl_sft", "32b", "8xh100")
    found = plan(recipe, ranks)
    by_name = {measure.name: measure for measure in found.measures}
    assert by_name["split master weights"].taken and by_name["moments in bf16"].taken
    without = replace(found.recipe, train=replace(found.recipe.train, exp_avg_dtype="fp32", exp_avg_sq_dtype="fp32"))
    more = plan(without, ranks).worst.total - found.worst.total
    assert by_name["moments in bf16"].bytes == pytest.approx(more)
    assert by_name["gradients in bf16"].bytes == pytest.approx(found.worst.grads / 2)
    assert not by_name["moments in 8 bits"].taken and by_name["moments in 8 bits"].bytes > 0
    lines = table(found).splitlines()
    assert any(line.startswith("  saves GB: split master weights ") for line in lines)
    assert any(line.startswith("  would save GB: ") and "full recompute" in line for line in lines)


@pytest.mark.slow
def test_layers_that_stages_do_not_divide() -> None:
    """94 layers over 4 stages; the first stage has the towers and fewer layers."""
    chosen = chosen_for("qwen3_vl_moe_sft", "235b-a22b", "8x8xh200", "parallel.pp=4")
    assert stage_layers(chosen, 94) == [23, 24, 24, 23]
    planned = chosen_for("qwen3_vl_sft", "4b", "4xh200", "parallel.tp=1", "parallel.cp=1", "train.global_batch=1")
    layers = stage_layers(planned, 36)
    assert planned.parallel.pp == 4 and sum(layers) == 36 and layers[0] < layers[1] and layers[-1] < layers[1]


GRPO = ("rl.algorithm=grpo", "rl.rewards={exact_match: 1}", "data.train=digits:train", "train.global_batch=8")


@pytest.mark.parametrize(
    ("given", "captured"),
    [
        (["packing.budget=2400"], True),
        (["packing.budget=20000"], False),
        (["packing.budget=2400", "engine.recompute=full"], False),
        (["packing.budget=2400", "parallel.tp=2"], True),
        (["packing.budget=8192", "parallel.tp=2"], True),
        (["packing.budget=2400", "parallel.tp=2", "parallel.sp=true"], False),
        (["packing.budget=2400", "model.freeze=[vision]"], True),
        (["packing.budget=2400", "lora.rank=16", "lora.dropout=0.05"], True),
        (["packing.budget=2400", "lora.rank=16", "parallel.tp=2"], False),
        (["packing.budget=2400", *GRPO], True),
        (["packing.budget=2400", *GRPO, "rl.rollout=vllm"], False),
    ],
)
def test_graphs_are_for_rows_that_a_gpu_is_done_with_sooner_than_the_host(given: list[str], captured: bool) -> None:
    plan = "parallel.plan=[recompute,graphs]" if "engine.recompute=full" not in given else "parallel.plan=[graphs]"
    chosen = chosen_for("qwen35_vl_sft", "2b", "2xh200", plan, *given)
    assert chosen.engine.cuda_graphs is captured


def test_layers_of_towers_are_launched_too() -> None:
    """A row of 8,192 tokens takes an H200 420 ms; 36 layers of the decoder and 64 of two towers take a host longer (benchmarks.md)."""
    given = ("1xh200", "parallel.plan=[recompute,graphs]", "packing.budget=8192")
    assert chosen_for("qwen25_omni_sft", "3b", *given, "machine.memory_gb=300").engine.cuda_graphs
    assert not chosen_for("qwen25_omni_sft", "3b", *given).engine.cuda_graphs, (
        "a row that runs without graphs would not fit beside them"
    )
    assert not chosen_for("qwen35_vl_sft", "2b", *given, "machine.memory_gb=300").engine.cuda_graphs


def test_towers_are_shared_where_ranks_that_exchange_tokens_would_wait_for_them() -> None:
    given = ("8xh200", "parallel.plan=[tp,pp,cp,ep,recompute,memory,towers]")
    assert chosen_for("qwen3_omni_sft", "30b-a3b", *given).parallel.towers == "shared"
    assert chosen_for("qwen3_vl_sft", "8b", *given).parallel.towers == "own", "no rank waits"
    assert chosen_for("qwen3_sft", "30b-a3b", *given).parallel.towers == "own", "no towers"
    assert (
        chosen_for(
            "qwen3_omni_sft", "30b-a3b", "8xh200", "parallel.plan=[tp,pp,cp,ep,recompute,memory]"
        ).parallel.towers
        == "own"
    )


def test_memory_counts_what_ranks_that_share_towers_exchange() -> None:
    """Embeddings and their gradients, with deepstack's three features, in bf16."""
    of_towers = model("qwen3_vl_sft", "30b-a3b")
    row = Row((4096,), 512, {"vision": (8192.0,)})
    recipes = [resolved("qwen3_vl_sft", "30b-a3b", "8xh200", "parallel.plan=[]", "parallel.ep=8", f"parallel.towers={towers}")[0]
               for towers in ("own", "shared")]  # fmt: skip
    own, shared = (memory(of_towers, recipe, row, 8, fused=True)[0].activations for recipe in recipes)
    assert shared - own == 2 * 8192 / 4 * (1 + 3) * of_towers.text.hidden_size * 2


def test_what_is_given_is_kept() -> None:
    chosen = chosen_for("qwen3_vl_sft", "32b", "8xh200", "parallel.pp=2", "engine.recompute=full")
    assert (chosen.parallel.pp, chosen.engine.recompute) == (2, "full")
    with pytest.raises(ConfigError, match="does not fit 8 GPUs of 80 GB"):
        chosen_for("qwen3_vl_sft", "32b", "8xh100", "parallel.tp=1", "engine.recompute=selective")


def test_a_host_without_room_for_samples() -> None:
    """A tiny model on two GPUs: not the model is too large."""
    given = ("qwen3_omni_sft", "tiny", "2xh100")
    with pytest.raises(ConfigError) as refused:
        chosen_for(*given, "machine.host_memory_gb=22")
    said = re.fullmatch(
        r"the ranks of a node would take 24 GB of its host's memory, and it has 22; (data\.ahead_mb=\d+) .* would do",
        str(refused.value),
    )
    assert said is not None
    chosen_for(*given, "machine.host_memory_gb=22", said[1])


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("parallel.tp", 3, "parallel sizes that are given (tp=3, "),
        ("train.micro_batch", 2, "train.micro_batch=2 with packing.mode=thd"),
    ],
)
def test_a_recipe_that_no_layout_could_fix_is_refused_as_such(key: str, value: int, said: str) -> None:
    recipe, ranks = resolved("qwen3_vl_sft", "4b", "8xh200")
    planned = [name for name in recipe.parallel.plan if f"parallel.{name}" != key]
    given = recipe.replace({key: value, "parallel.plan": planned})
    cost = model("qwen3_vl_sft", "4b")
    with pytest.raises(ConfigError) as caught:
        choose_layout(cost, given, ranks, typical_row(given, cost.cost))
    assert str(caught.value).startswith(said)


def test_numbers_out_of_all_bounds_are_refused_at_once() -> None:
    """No layout is searched whose stages have no layers, and a row of 10^8 tokens is summed up once, not for each layout."""
    recipe, ranks = resolved("qwen3_vl_sft", "30b-a3b", "8xh200", "parallel.vpp=1000")
    found = model("qwen3_vl_sft", "30b-a3b")
    assert not list(candidates(found, recipe, ranks, typical_row(recipe, found.cost)))
    row = typical_row(replace(recipe, packing=replace(recipe.packing, budget=10**8)), found.cost)
    items = row.items["vision"]
    assert items.padded(7) == sum(-(-rows // 7) * 7 for rows in row.media["vision"])
    assert len(items._counts) <= 2 and items.total == sum(row.media["vision"])


def test_a_small_model_is_not_cut() -> None:
    chosen = chosen_for("llava_sft", "onevision-0.5b", "8xh100")
    sizes = chosen.parallel
    assert (sizes.tp, sizes.pp, sizes.cp, sizes.ep, chosen.engine.recompute) == (1, 1, 1, 1, "none")


def test_frozen_parts_make_room() -> None:
    with pytest.raises(ConfigError):
        chosen_for("qwen3_vl_sft", "8b", "1xh100")
    recipe, _ = resolved("qwen3_vl_sft", "8b", "1xh100", "model.freeze=[language]")
    frozen = model_of(recipe)
    assert frozen.parameters.trained == frozen.parameters.by_part()["vision"]
    assert choose_layout(frozen, recipe, 1, typical_row(recipe, frozen.cost)).parallel.tp == 1


def test_adapters_make_room() -> None:
    """No gradient and no optimizer state of the weights, and a third less to compute."""
    recipe, _ = resolved("qwen3_vl_lora", "8b", "1xh100", "packing.budget=2048")
    model = model_of(recipe)
    assert 0 < model.parameters.trained < 0.01 * model.parameters.total
    found = plan(recipe, 1)
    assert found.fits and found.worst.optimizer < 0.05 * found.worst.weights
    assert found.step["decoder"] == pytest.approx(2 * found.forward["decoder"] * recipe.train.global_batch)
    assert found.step["vision"] == pytest.approx(found.forward["vision"] * recipe.train.global_batch)


@pytest.fixture(scope="module")
def small() -> Recipe:
    return validate(load_recipe("qwen3_vl_sft", ["size=tiny", "hardware=cpu"]), 1)


@pytest.mark.sampled(2)
def test_a_model_that_cannot_fit_is_refused_with_a_fix(small: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    from zoo.planner import plan as planning

    refuse_misfit(small, 1, 1)
    monkeypatch.setattr(planning, "host_memory", lambda *_: 0)
    refuse_misfit(small, 1, 1)  # nothing is known
    for memory_there, fix in ((20_000_000, "take a smaller size="), (30_000_000, "set packing.budget lower")):
        monkeypatch.setattr(planning, "host_memory", lambda *_, size=memory_there: size)
        with pytest.raises(ConfigError, match=f"{fix}.*zoo plan"):
            refuse_misfit(small, 1, 1)


@pytest.mark.sampled(2)
def test_a_plan_in_numbers(small: Recipe) -> None:
    found: dict[str, Any] = plan(replace(small), 1).as_dict()
    assert found["parameters"]["total"] == 1_322_304
    (stage,) = found["memory_bytes"]
    assert stage["weights"] == stage["grads"] == 4 * 1_322_304
    assert stage["optimizer"] == 8 * 1_322_304
    assert stage["total"] == pytest.approx(sum(v for k, v in stage.items() if k != "total"))
    assert found["flops"]["step"]["decoder"] == pytest.approx(
        3 * found["flops"]["forward_of_a_row"]["decoder"] * small.train.global_batch
    )
    frozen = plan(small.replace({"model.freeze": ["vision"]}), 1)
    assert frozen.step["vision"] == pytest.approx(frozen.forward["vision"] * small.train.global_batch)
    again = plan(small.replace({"engine.recompute": "full"}), 1)
    assert again.step["decoder"] == pytest.approx(4 / 3 * found["flops"]["step"]["decoder"])
    assert again.worst.activations < stage["activations"]


def test_a_plan_with_muon(small: Recipe) -> None:
    """Matrices have one moment instead of two, and their Newton-Schulz iteration counts."""
    found = plan(small.replace({"train.optimizer": "muon"}), 1)
    others = plan(small, 1)
    matrices = found.optimizer["muon"]
    assert matrices + found.optimizer["adamw"] == found.trained and 0.8 < matrices / found.trained < 0.9
    assert others.optimizer == {"adamw": others.trained}
    assert found.worst.optimizer == others.worst.optimizer - 4 * matrices
    assert found.worst.total == others.worst.total - 4 * matrices
    assert found.step == {**others.step, "newton_schulz": pytest.approx(5.0e9, rel=0.5)}
    assert "Newton-Schulz" in table(found) and "Newton-Schulz" not in table(others)
    frozen = plan(small.replace({"train.optimizer": "muon", "model.freeze": ["vision"]}), 1)
    assert frozen.step["newton_schulz"] < found.step["newton_schulz"]
    half = plan(small.replace({"train.optimizer": "muon", "engine.precision": "bf16"}), 1)
    (split,) = [one for one in half.measures if one.name == "split master weights"]
    assert split.bytes == 2 * half.trained


def test_weights_of_the_hub_are_planned_by_their_own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    (tmp_path / "config.json").write_text(json.dumps(load_recipe("qwen3_vl_sft", ["size=4b"]).model.arch))
    given = ["hardware=8xh100", "model.init=org/name", "size=tiny"]
    recipe = load_recipe("qwen3_vl_sft", given)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_: str(tmp_path / "config.json"))
    assert sum(plan(recipe, 8).parameters.values()) == 4_437_815_808
    chosen = choose_layout_here(recipe, 8)
    assert chosen.parallel.plan == [] and chosen.model == recipe.model

    def offline(*_: str) -> str:
        raise OSError

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(ConfigError, match="its architecture is not known"):
        plan(recipe, 8)
    assert choose_layout_here(recipe, 8).parallel.plan == []
    refuse_misfit(recipe, 8, 8)


def test_stages_of_a_pipeline_hold_copies_of_the_towers_whose_work_they_share() -> None:
    """Weights and gradients in bf16 on the second stage, and on each what half of a step's media take, not all of the rows in flight."""
    of_towers = model("qwen3_vl_sft", "2b")
    row = Row((4096,), 512, {"vision": (8192.0,)})
    given = ("2xh200", "parallel.plan=[]", "parallel.pp=2", "train.global_batch=8", "packing.budget=4096")
    recipes = [resolved("qwen3_vl_sft", "2b", *given, f"parallel.towers={towers}")[0] for towers in ("own", "shared")]
    own, shared = (memory(of_towers, recipe, row, 2, fused=True) for recipe in recipes)
    towers = sum(weights.count for weights in tower_weights(of_towers))
    assert [new.weights - old.weights for old, new in zip(own, shared, strict=True)] == [0, 2 * towers]
    assert [new.grads - old.grads for old, new in zip(own, shared, strict=True)] == [0, 2 * towers]
    micro_batches = rows_of_step(recipes[0], row)
    embeddings = 2 * 8192 / 4 * (1 + 3) * of_towers.text.hidden_size * 2 * micro_batches
    second = shared[1].activations - own[1].activations
    assert second > embeddings / 2
    kept_of_row = (second - embeddings / 2) * 2 / micro_batches  # by towers
    assert shared[0].activations - own[0].activations == pytest.approx(
        embeddings + (micro_batches / 2 - 2) * kept_of_row
    )


def test_towers_are_shared_where_a_pipeline_would_wait_for_its_first_stage() -> None:
    given = ("2xh200", "parallel.plan=[towers]", "parallel.pp=2", "packing.budget=8192", "train.global_batch=8")
    assert chosen_for("qwen3_vl_sft", "2b", *given).parallel.towers == "shared"
    chosen = chosen_for("qwen3_vl_sft", "2b", *given, "parallel.stage_layers=[11,17]")
    assert chosen.parallel.stage_layers == [11, 17], "as given"
