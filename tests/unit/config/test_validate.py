"""Every refusal of a recipe that cannot run, and the defaults that follow from other keys."""

from typing import Any

import pytest
from support.refusals import DENSE, MOE, TEXT, error_of, gpus

from zoo.config.architecture import num_experts, text_config
from zoo.config.compose import load_recipe
from zoo.config.derived import run_folder
from zoo.config.schema import ModelConfig, ParallelConfig, Recipe, TrainConfig
from zoo.config.validate import validate
from zoo.errors import ConfigError


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 0)


# --- derived defaults


def test_defaults_on_one_rank() -> None:
    recipe = validate(MOE, 1)
    assert recipe.parallel.sp is False
    assert recipe.packing.align == 1
    assert recipe.engine.precision == "fp32"
    assert recipe.run.dir == "runs/r-tiny"
    assert recipe.train.epochs is None
    assert validate(recipe, 1) == recipe


def test_precision_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 1)
    assert validate(MOE, 1).engine.precision == "bf16"
    assert validate(MOE.replace({"engine.precision": "fp32"}), 1).engine.precision == "fp32"


@pytest.mark.parametrize(
    ("tp", "cp", "sp", "align"),
    [
        (1, 1, False, 1), (2, 1, True, 2), (1, 2, False, 4), (2, 2, True, 4), (8, 2, True, 16), (4, 2, True, 8),
        (2, 3, True, 6),
    ],
)  # fmt: skip
def test_sequence_parallel_and_alignment(tp: int, cp: int, sp: bool, align: int) -> None:
    recipe = validate(MOE.replace({"parallel.tp": tp, "parallel.cp": cp}), tp * cp)
    assert (recipe.parallel.sp, recipe.packing.align) == (sp, align)


def test_a_dense_model_leaves_sequence_parallel_off() -> None:
    recipe = validate(DENSE.replace({"parallel.tp": 2}), 2)
    assert (recipe.parallel.sp, recipe.packing.align) == (False, 1)


def test_steps_stay_open_when_epochs_are_given() -> None:
    assert validate(MOE.replace({"train.steps": None, "train.epochs": 0.5}), 1).train.steps is None


def test_run_folder() -> None:
    assert run_folder(MOE.replace({"run.dir": "x/y"})) == "x/y"
    assert run_folder(MOE.replace({"recipe": "my/own.yaml", "size": None})) == "runs/own"


@pytest.mark.parametrize("arch", [TEXT, {"text_config": TEXT}, {"thinker_config": {"text_config": TEXT}}])
def test_the_text_config_is_found_wherever_it_lies(arch: dict[str, Any]) -> None:
    assert text_config(arch) == TEXT
    assert num_experts(arch) == 6


def test_a_dense_model_has_no_experts_whatever_its_config_says() -> None:
    stray = {"num_experts": 6, "num_local_experts": 6}
    for arch in (
        {"model_type": "qwen3_vl", "text_config": {**TEXT, **stray, "model_type": "qwen3_vl_text"}},
        {"model_type": "qwen3_5", "text_config": {**TEXT, **stray}},
    ):
        assert num_experts(arch) == 0
    moe = {"model_type": "qwen3_vl_moe", "text_config": {**TEXT, "model_type": "qwen3_vl_moe_text"}}
    assert num_experts(moe) == 6
    assert num_experts({**TEXT, "model_type": "qwen3_next"}) == 6
    dense = load_recipe("qwen3_vl_sft", ["size=tiny", "model.arch.text_config.num_experts=6"])
    tensor = validate(dense.replace({"parallel.tp": 2, "train.global_batch": 8}), 2)
    assert tensor.parallel.sp is False
    with pytest.raises(ConfigError, match="the model has no experts"):
        validate(dense.replace({"parallel.ep": 2, "train.global_batch": 8}), 2)


# --- refusals


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("ranks", "changes", "message"),
    [
        (6, {"parallel.tp": 2, "parallel.pp": 2},
         "parallel.tp=2 * pp=2 * cp=1 = 4 does not divide the 6 ranks of the run; 1, 2, 3 or 6 would, or nproc=8"),
        (1, {"parallel.tp": 2},
         "parallel.tp=2 * pp=1 * cp=1 = 2 does not divide the 1 rank of the run; 1 would, or nproc=2"),
        (4, {"parallel.ep": 3},
         "parallel.etp=1 * ep=3 * pp=1 = 3 does not divide the 4 ranks of the run; 1, 2 or 4 would, or nproc=6"),
        (4, {"parallel.ep": 4, "train.global_batch": 4},
         "parallel.ep=4 does not divide the 6 experts of the model; 1, 2, 3 or 6 would"),
        (5, {"parallel.etp": 5, "train.global_batch": 5},
         "parallel.etp=5 does not divide the experts' width 96; 1, 2, 3, 4, 6, 8, ..., 48 or 96 would"),
        (2, {"parallel.ep": 2, "parallel.dispatch": "deepep", "train.global_batch": 2},
         "parallel.dispatch=deepep: its package deep_ep is not installed; install DeepEP (for hybridep, its branch hybrid-ep), "
         "or use parallel.dispatch=alltoall"),
        (1, {"train.main_grads_dtype": "bf16", "engine.precision": "fp32"},
         "train.main_grads_dtype=bf16 with engine.precision=fp32: gradients of fp32 weights are kept in fp32; leave "
         "train.main_grads_dtype out, or set engine.precision=bf16"),
        (1, {"train.lr": 1e-6, "train.min_lr": 2e-5},
         "train.min_lr=2e-05 is above train.lr=1e-06: the rate falls from train.lr to train.min_lr; give a lower train.min_lr, 0 say"),
        (1, {"train.decay_steps": 1},
         "train.decay_steps=1 with train.schedule=cosine: wsd alone has a decay of its own length; set train.schedule=wsd, or "
         "leave train.decay_steps out"),
        (1, {"train.schedule": "wsd", "train.decay_steps": 4, "train.warmup_steps": 7, "train.steps": 10},
         "train.warmup_steps=7 and train.decay_steps=4 are more than all steps of the run (10); lower one of them, or train "
         "longer (train.steps, train.epochs)"),
        (16, {"parallel.tp": 16},
         "parallel.tp=16 does not divide the 8 attention heads and 2 key-value heads of the model; 1, 2, 4 or 8 would"),
        (8, {"parallel.pp": 8},
         "parallel.pp=8 * vpp=1 = 8 stages for the 6 layers of the model: each needs one at least; lower parallel.pp or vpp"),
        (2, {"parallel.pp": 2, "parallel.stage_layers": [6]},
         "parallel.stage_layers=[6]: wanted 2 numbers (parallel.pp=2 * vpp=1); parallel.stage_layers=[] derives them"),
        (2, {"parallel.pp": 2, "parallel.stage_layers": [2, 3]},
         "parallel.stage_layers=[2, 3] are 5 layers and the model has 6; parallel.stage_layers=[] derives them"),
        (1, {"parallel.vpp": 2}, "parallel.vpp=2 needs pipeline stages: give parallel.pp=2 or more, or vpp=1"),
        (8, {"train.global_batch": 7},
         "train.global_batch=7 has no micro-batch of train.micro_batch=1 for each of 8 data-parallel replicas; 8 would do, or fewer ranks"),
        (2, {"train.global_batch": 6, "train.micro_batch": 4, "packing.mode": "none"},
         "train.global_batch=6 is no multiple of train.micro_batch=4; 4 or 8 would work"),
        (1, {"train.micro_batch": 2},
         "train.micro_batch=2 with packing.mode=thd: a packed row counts as 1; set it to 1 and widen the row with "
         "packing.budget"),
        (
            2,
            {
                "parallel.tp": 2,
                "model.arch.thinker_config.text_config.intermediate_size": 35,
                "model.arch.thinker_config.text_config.mlp_only_layers": [0],
            },
            "parallel.tp=2 does not divide the model's intermediate_size 35; 1, 5, 7 or 35 would",
        ),
        (1, {"parallel.sp": True},
         "parallel.sp=true with parallel.tp=1: sequence parallel shares the tokens out over tensor-parallel ranks; "
         "give parallel.tp=2 or more, or leave parallel.sp open"),
        (2, {"parallel.tp": 2, "parallel.sp": False},
         "parallel.sp=false with parallel.tp=2: a model with experts needs sequence parallel under tensor parallel; "
         "leave parallel.sp open or set it to true"),
        (2, {"parallel.cp": 2, "packing.align": 2},
         "packing.align=2: wanted a multiple of 4 (parallel.cp=2, parallel.tp=1, sp=false); packing.align=null "
         "derives it"),
        (2, {"parallel.cp": 2, "packing.pad_to": 4098},
         "packing.pad_to=4098 is no multiple of the alignment 4; 4096 or 4100 would work"),
        (1, {"packing.pad_to": 100},
         "packing.pad_to=100 is less than packing.budget=4096: a full row would not fit; set both to the same number"),
        (1, {"train.steps": None}, "train.steps and train.epochs are both null: give one of them, such as train.epochs=1"),
        (1, {"engine.backend": "te"},
         "engine.backend=te: Transformer Engine needs a GPU and none is here; use engine.backend=torch"),
        (1, {"packing.budget": 0}, "packing.budget=0: wanted a whole number from 1 to 100,000,000"),
        (1, {"train.steps": -1}, "train.steps=-1: wanted a whole number from 1 to 1,000,000,000 or null"),
        (1, {"parallel.tp": 0}, "parallel.tp=0: wanted a whole number from 1 to 100,000"),
        (1, {"train.lr": -1}, "train.lr=-1: wanted a number from 0 to 100"),
        (1, {"train.lr": float("nan")}, "train.lr=nan: wanted a number from 0 to 100"),
        (1, {"train.beta2": 1}, "train.beta2=1: wanted a number from 0, below 1"),
        (1, {"data.train": []}, "data.train=[]: nothing to train on; name a JSONL file or a bundled set"),
        (1, {"model.init": "./no/folder"},
         "model.init=./no/folder: no such folder; wanted random, a checkpoint folder or a hub id"),
    ],
)  # fmt: skip
def test_a_recipe_that_cannot_run(ranks: int, changes: dict[str, Any], message: str) -> None:
    assert error_of(MOE, changes, ranks) == message


def test_a_decay_that_just_fits_and_one_of_unknown_steps() -> None:
    wsd = {"train.schedule": "wsd", "train.decay_steps": 3, "train.warmup_steps": 7}
    assert validate(MOE.replace({**wsd, "train.steps": 10}), 1).train.decay_steps == 3
    epochs = {**wsd, "train.steps": None, "train.epochs": 1}  # how many that is shows when the data are open
    assert validate(MOE.replace(epochs), 1).train.decay_steps == 3


def test_steps_and_epochs_both_given() -> None:
    recipe = Recipe(model=MOE.model, train=TrainConfig(steps=5, epochs=2))
    message = "train.steps=5 and train.epochs=2 are both given: set one of them to null"
    with pytest.raises(ConfigError, match=f"^{message}$"):
        validate(recipe, 1)


def test_expert_parallel_of_a_dense_model() -> None:
    message = "parallel.ep=2, etp=1: the model has no experts; set both to 1"
    assert error_of(DENSE, {"parallel.ep": 2}, 2) == message


def test_width_of_dense_layers() -> None:
    odd = {"parallel.tp": 2, "model.arch.thinker_config.text_config.intermediate_size": 51}
    message = "parallel.tp=2 does not divide the model's intermediate_size 51; 1, 3, 17 or 51 would"
    assert error_of(DENSE, odd, 2) == message
    assert error_of(MOE, {**odd, "model.arch.thinker_config.text_config.mlp_only_layers": [1]}, 2) == message
    assert validate(MOE.replace(odd), 2).parallel.tp == 2  # no layer has that width


def test_key_value_heads_may_be_fewer_than_tensor_parallel_ranks() -> None:
    assert validate(MOE.replace({"parallel.tp": 4}), 4).parallel.tp == 4


def test_no_architecture() -> None:
    message = "model.arch is empty and model.init=random: give size=, or model.init=<folder>"
    assert error_of(Recipe(train=TrainConfig(steps=1)).replace({"model.family": "qwen3_omni"}), {}) == message
    hub = Recipe(
        model=ModelConfig(family="qwen3_omni", init="some/hub-id"),
        parallel=ParallelConfig(ep=2),
        train=TrainConfig(steps=1),
    )
    assert validate(hub, 2).parallel.ep == 2  # nothing to check against before the weights are fetched


def test_unknown_family_and_part() -> None:
    assert error_of(Recipe(train=TrainConfig(steps=1)), {}) == "model.family is not set; `zoo list` shows the families"
    assert error_of(MOE, {"model.family": "nope"}).startswith("model.family: no family 'nope'; nearest: ")
    message = error_of(MOE, {"model.freeze": ["visoin"]})
    assert message.startswith("model.freeze=visoin: qwen3_omni has no such part; nearest: vision")


def test_a_recipe_built_by_hand_is_checked_for_types() -> None:
    recipe = Recipe(model=MOE.model, train=TrainConfig(steps="many"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^train.steps=many: wanted a whole number from 1 to 1,000,000,000 or null$"):
        validate(recipe, 1)


# --- adapters


@pytest.mark.parametrize("loss", ["nll", "dpo", "ipo", "simpo", "orpo", "kto", "reward"])
def test_losses_of_preferences_leave_dropout_out(loss: str) -> None:
    changes = {"lora.rank": 4, "lora.dropout": 0.25, "train.loss": loss, "data.blank_answers": 0.0}
    found = validate(MOE.replace(changes), 1)
    assert found.lora.dropout == (0.25 if loss == "nll" else 0.0)
    keep = MOE.replace({**changes, "lora.keep_dropout": True})
    if loss != "nll":
        assert validate(keep, 1).lora.dropout == 0.25
    else:
        with pytest.raises(ConfigError, match=r"lora\.keep_dropout=true with train\.loss=nll"):
            validate(keep, 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora.rank": -1}, "lora.rank=-1: wanted a whole number from 0"),
        ({"lora.rank": 4, "lora.alpha": 0.0}, "lora.alpha=0.0: wanted a number above 0, at most 1,000,000"),
        ({"lora.rank": 4, "lora.dropout": 1.0}, "lora.dropout=1.0: wanted a number from 0, below 1"),
        ({"lora.rank": 4, "train.optimizer": "muon"}, "train.optimizer=muon with lora.rank=4: Muon updates whole"),
        ({"lora.rank": 4, "lora.targets": []}, "lora.targets=[]: no linear would have an adapter"),
        ({"lora.rank": 4, "lora.parts": ["visoin"]}, "lora.parts=visoin: qwen3_omni has no such part; nearest: vision"),
        ({"lora.rank": 4, "lora.parts": ["vision"], "model.freeze": ["vision"]},
         "lora.parts=vision: model.freeze has vision too"),
        ({"lora.rank": 4, "train.lr_scale": {"audio": 0.1}},
         "train.lr_scale.audio: neither lora.parts nor lora.whole_parts has audio"),
        ({"lora.rank": 4, "lora.whole_parts": ["mergre"]},
         "lora.whole_parts=mergre: qwen3_omni has no such part; nearest: merger"),
        ({"lora.rank": 4, "lora.whole_parts": ["audio"], "model.freeze": ["audio"]},
         "lora.whole_parts=audio: model.freeze has audio too"),
        ({"lora.rank": 4, "lora.parts": ["vision", "language"], "lora.whole_parts": ["vision"]},
         "lora.whole_parts=vision: lora.parts has vision too"),
        ({"lora.rank": 4, "lora.parts": ["vision"], "lora.whole_parts": ["language"]},
         "lora.whole_parts=language: a language model that is trained whole"),
        ({"lora.rank": 4, "lora.init": "nowhere"}, "lora.init=nowhere: no adapter_config.json there"),
        ({"lora.rank": 4, "lora.merge_first": "nowhere"}, "lora.merge_first=nowhere: no adapter_config.json there"),
        ({"lora.init": "nowhere"}, "lora.init=nowhere with lora.rank=0: no adapter is trained"),
    ],
)  # fmt: skip
def test_adapters_that_cannot_be_trained(changes: dict[str, Any], words: str) -> None:
    assert words in error_of(MOE, changes)


def test_a_reference_is_of_a_loss_and_of_adapters_that_have_one() -> None:
    assert "dpo, ipo, kto alone have a reference" in error_of(MOE, {"train.loss": "simpo", "train.reference": "base"})
    assert "kto alone has it" in error_of(MOE, {"train.loss": "dpo", "train.desirable_weight": 2.0})
    assert "reward alone has it" in error_of(MOE, {"train.loss": "dpo", "train.center_rewards": 2.0})
    assert "base without adapters" in error_of(MOE, {"train.loss": "dpo", "train.reference": "base"})
