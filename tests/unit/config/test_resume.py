"""What a resumed run may have otherwise: every key is in one list, and what is refused names keys, values and a way."""

from dataclasses import asdict
from operator import attrgetter
from typing import Any

import pytest

from zoo.config.compose import load_recipe
from zoo.config.layers.keys import keys
from zoo.config.resume import FIXED, HELD, MAY_CHANGE, changes, refuse
from zoo.config.schema import Recipe
from zoo.config.validate import validate
from zoo.errors import ConfigError

FREE = [key for group in MAY_CHANGE.values() for key in group]


def recipe(*overrides: str) -> Recipe:
    return load_recipe("qwen3_vl_sft", ["size=tiny", "hardware=cpu", *overrides])


def found(before: Recipe, after: Recipe) -> list[str]:
    return [str(change) for change in changes(asdict(before), after)]


def test_every_key_of_the_schema_is_in_one_of_the_lists() -> None:
    listed = sorted([*FREE, *HELD, *FIXED])
    assert listed == sorted(keys(Recipe)), "a new key goes into MAY_CHANGE, HELD or FIXED"


OTHER: dict[str, Any] = {
    "run.seed": 7, "train.loss": "dpo", "train.reference": "base", "distill.teacher": "elsewhere", "train.label_smoothing": 0.1, "embed.pooling": "mean", "embed.dimensions": [8], "embed.instruction": "Find it", "embed.template": "plain", "model.family": "llava", "model.init": "elsewhere", "model.resize_embeddings": True, "model.freeze": ["vision"], "packing.mode": "none",
    "packing.budget": 99, "data.train": [], "data.eval": [], "data.labels": "last",
    "data.overlong": "drop", "data.shuffle": False, "lora.rank": 3, "lora.targets": ["q_proj"], "lora.parts": ["vision"], "lora.whole_parts": ["merger"],
    "lora.rank_pattern": {"q_proj": 4}, "lora.alpha_pattern": {"q_proj": 4.0},
    "train.schedule": "wsd", "train.decay_steps": 9, "lora.init": "adapter", "lora.merge_first": "adapter", "lora.base_dtype": "fp8", "train.optimizer": "muon", "engine.precision": "bf16", "engine.fp8": True, "engine.fp8_recipe": "tensorwise", "train.lr_scale": {"vision": 0.5},
    "data.augment": 0.5, "data.augment_variants": 3, "data.blank_answers": 0.5, "data.bundled": {"augment": 0.5}, "data.template": {"add_vision_id": True},
    "data.min_pixels": 4096, "data.max_pixels": 65536, "data.video_max_pixels": 65536, "data.special_tokens": ["<point>"], "data.codec": "codec:encode",
    "rl.algorithm": "grpo", "rl.clip_low": 0.1, "rl.clip_high": 0.1, "rl.length_norm": "token", "rl.std_norm": False, "rl.reference": "base",
    "rl.dynamic_sampling": 3, "rl.overlong_buffer": 3, "rl.importance": "none", "rl.rewards": {"anls": 1.0}, "rl.reward_model": "scorer",
    "rl.on_reward_error": "zero", "rl.rollout": "vllm", "rl.vllm.max_model_len": 99, "rl.vllm.options": {"seed": 1}, "rl.router_replay": True,
}  # fmt: skip


@pytest.mark.sampled(10)
@pytest.mark.parametrize("key", [key for key in FIXED if key != "model.arch"])
def test_every_fixed_key_is_compared(key: str) -> None:
    before = recipe().replace({"engine.fp8": True} if key == "engine.fp8_recipe" else {})
    section = key.rpartition(".")[0]
    old = attrgetter(key)(before)
    new = OTHER[key] if key in OTHER else old + 1 if isinstance(old, int) else old / 2 or 0.5
    after = before.replace({key: new})
    wrong = changes(asdict(before), after)
    assert [change.key for change in wrong] == [key]
    with pytest.raises(ConfigError) as refusal:
        refuse("iter_3", wrong, after)
    assert f"({key}: " in str(refusal.value) and f"run.accept_changes=[{key}]" in str(refusal.value)
    for name in (key, section):
        refuse("iter_3", wrong, after.replace({"run.accept_changes": [name]}))


def test_what_is_free_is_no_change() -> None:
    more = ("train.steps=9", "train.max_minutes=3", "parallel.tp=2", "log.tensorboard=false", "data.root=/elsewhere")
    changed = recipe(*more, "run.dir=other", "nproc=4").replace({"train.micro_batch": 2})
    assert found(recipe(), changed) == []


def test_how_the_optimizer_state_is_held_is_free_and_said() -> None:
    before, after = recipe(), recipe("train.exp_avg_dtype=fp8")
    saved = asdict(before)
    assert found(before, before) == []
    (change,) = changes(saved, after)
    assert str(change) == "train.exp_avg_dtype: fp32 there, fp8 here" and change.accepted(after)


def test_a_batch_that_planning_raised_is_free_and_said() -> None:
    after = recipe("train.global_batch=12")
    planned = after.replace({"parallel.planned": ["tp", "batch"]})
    for one, free in ((after, False), (planned, True)):
        (change,) = changes(asdict(recipe()), one)
        assert change.key == "train.global_batch" and change.accepted(one) == free


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        (["a.jsonl"], ["moved/a.jsonl"], []),  # which rows those are is seen when they are read
        (["a.jsonl"], ["a.jsonl", "b.jsonl"], []),
        (["a.jsonl", "b.jsonl"], ["a.jsonl"], ["data.train"]),
        ([{"path": "a", "weight": 1}, {"path": "b", "weight": 2}], [{"path": "a", "weight": 2}, {"path": "c", "weight": 2}],
         ["data.train[0].weight"]),
        ([{"path": "a", "weight": 1}], [{"path": "a", "weight": 1}, {"path": "b", "weight": 1}], ["data.train"]),
        ([{"path": "a", "held_out": 0.1}], [{"path": "a", "held_out": 0.2, "seed": 3}],
         ["data.train[0].held_out", "data.train[0].seed"]),
    ],
)  # fmt: skip
def test_entries_of_data(old: list[Any], new: list[Any], wanted: list[str]) -> None:
    before, after = recipe().replace({"data.train": old}), recipe().replace({"data.train": new})
    assert [change.key for change in changes(asdict(before), after)] == wanted


def test_a_recipe_that_is_lost_or_lacks_keys() -> None:
    saved = asdict(recipe("train.lr=1e-3"))
    del saved["data"], saved["train"]["clip_grad"]
    after = recipe("train.lr=2e-3", "train.clip_grad=3")
    assert [change.key for change in changes(saved, after)] == ["train.lr"]
    assert changes({}, after) == []


def test_names_that_mean_the_same(tmp_path: Any) -> None:
    (tmp_path / "there").mkdir()
    before = recipe().replace({"model.init": f"{tmp_path}/there", "lora.parts": ["vision", "language"], "lora.rank": 1})
    after = before.replace({"model.init": f"{tmp_path}/there/../there/", "lora.parts": ["language", "vision"]})
    assert found(before, after) == []


def test_a_key_that_there_is_not_can_t_be_accepted() -> None:
    with pytest.raises(ConfigError, match=r"run.accept_changes=train.lrr: .*nearest: train.lr"):
        validate(recipe("run.accept_changes=[train.lrr]"), 1)
    validate(recipe("run.accept_changes=[train.lr,data,model.arch.text_config]"), 1)


def test_a_folder_of_another_experiment_is_named_in_one_sentence() -> None:
    before = recipe()
    after = recipe(
        "data.train=mine.jsonl", "train.lr=0.5", "train.beta1=0.1", "train.beta2=0.2", "train.eps=0.3", "run.seed=5", "lora.rank=4",
        "train.clip_grad=9", "packing.budget=77",
    )  # fmt: skip
    wrong = changes(asdict(before), after)
    with pytest.raises(ConfigError) as refusal:
        refuse("runs/x/iter_3", wrong, after, "another_recipe")
    message = str(refusal.value)
    assert message.startswith("runs/x/iter_3 belongs to another experiment (recipe another_recipe there")
    assert "lora.rank" in message and "train.lr" in message and "train.beta2" not in message
    assert message.endswith("run.dir=FOLDER") and f"and {len(wrong) - 3} more keys differ" in message
