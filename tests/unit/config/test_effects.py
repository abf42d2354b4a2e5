"""Every key of the schema states when it has an effect, and is refused where a user sets it and it has none."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.recipes import write

import zoo
from zoo.config import compose
from zoo.config.checks.effects import refuse_without_effect
from zoo.config.compose import load_recipe, save_recipe
from zoo.config.layers.keys import ALWAYS, Key, When, keys, show_value
from zoo.config.schema import Recipe, conditions
from zoo.errors import ConfigError
from zoo.launch.prepare import prepare

# Each condition with overrides under which it holds, and others under which it does not.
SIDES: dict[str, tuple[list[str], list[str]]] = {
    "ADAPTERS": (["lora.rank=8"], ["lora.rank=0"]),
    "DENSE_ADAPTERS": ([], ["lora.rank=8", "lora.targets=[experts.down_proj, experts.gate_up_proj]"]),
    "WEIGHTS": (["model.init=org/name"], []),
    "WHOLE_WEIGHTS": ([], ["lora.rank=8"]),
    "EXPORT": ([], ["export=false"]),
    "HUB_REPO": (["hub.repo=me/mine"], []),
    "EXPERTS": (["recipe=qwen3_vl_moe_sft"], ["recipe=qwen3_vl_sft"]),
    "EXPERT_EXCHANGE": (["recipe=qwen3_vl_moe_sft", "parallel.ep=2"], ["recipe=qwen3_vl_moe_sft"]),
    "SHARED_MEDIA": (["parallel.pp=2"], []),
    "MTP": (["recipe=qwen3_next_sft"], ["recipe=qwen3_moe_sft"]),
    "LINEAR_ATTENTION": (["recipe=qwen35_vl_sft"], ["recipe=glm45v_sft"]),
    "NLL": ([], ["train.loss=simpo"]),
    "PREFERENCES": (["train.loss=orpo"], ["train.loss=reward"]),
    "REFERENCE": (["train.loss=ipo"], ["train.loss=simpo"]),
    "SMOOTHED": (["train.loss=simpo"], ["train.loss=ipo"]),
    "SIMPO": (["train.loss=simpo"], ["train.loss=dpo"]),
    "KTO": (["train.loss=kto"], ["train.loss=dpo"]),
    "REWARD": (["train.loss=reward"], ["train.loss=kto"]),
    "PAIRS_OR_LABELS": (["train.loss=dpo"], ["train.loss=nll"]),
    "EMBED": (["train.loss=embed"], ["train.loss=reward"]),
    "DROPOUT": (["lora.dropout=0.5"], ["lora.dropout=0"]),
    "TEACHER": (["distill.teacher=somewhere"], []),
    "NO_TEACHER": ([], ["distill.teacher=somewhere"]),
    "MUON": (["train.optimizer=muon"], ["train.optimizer=adamw"]),
    "FALLING_RATE": (["train.schedule=linear"], ["train.schedule=constant"]),
    "WSD": (["train.schedule=wsd"], ["train.schedule=cosine"]),
    "STOPS": (["train.on_bad_step=stop"], ["train.on_bad_step=skip"]),
    "SKIPS": (["train.on_bad_step=skip"], ["train.on_bad_step=stop"]),
    "SPIKES": ([], ["train.spike=0"]),
    "HELD_OUT": (["data.train={path: a.jsonl, held_out: 0.1}"], ["data.train=a.jsonl"]),
    "EVALUATION": (["data.train=a.jsonl", "data.eval=b.jsonl"], ["data.eval=b.jsonl", "train.eval_rows=0"]),
    "ANSWERS": ([], ["train.loss=reward"]),
    "PREDICTIONS": ([], ["log.predictions=0"]),
    "EARLY_STOP": (["train.early_stop=loss"], []),
    "PACKED": ([], ["packing.mode=none"]),
    "PADDED": (["packing.mode=none"], []),
    "MEDIA": (["recipe=qwen3_asr_sft"], ["recipe=gemma3_text_sft"]),
    "IMAGES": (["recipe=gemma3_sft"], ["recipe=qwen3_asr_sft"]),
    "VIDEOS": (["recipe=internvl_sft"], ["recipe=gemma4_sft"]),
    "WORKERS": (["data.workers=2"], ["data.workers=0"]),
    "ENCODING": (["data.encode_in_workers=true"], ["data.encode_in_workers=false"]),
    "AUGMENTED": (["data.augment=0.5"], ["data.augment=0"]),
    "ONLY_BUNDLED": ([], ["data.train=[digits:train, a.jsonl]"]),
    "TENSOR_PARALLEL": (["hardware=8xh200"], ["parallel.tp=1"]),
    "PIPELINE": (["parallel.pp=2"], []),
    "CONTEXT_PARALLEL": (["parallel.cp=2"], []),
    "FP8": (["engine.fp8=true"], []),
    "FULL_RECOMPUTE": (["engine.recompute=full"], []),
    "NO_GRAPHS": ([], ["engine.cuda_graphs=true"]),
    "OPEN_RANKS": ([], ["nproc=1"]),
    "RL": (["task=grpo"], []),
    "IMPORTANCE": ([], ["rl.importance=none"]),
    "VLLM": (["rl.rollout=vllm"], []),
    "ZOO_ROLLOUT": ([], ["rl.rollout=vllm"]),
    "PROFILE": (["run.profile=2:3"], []),
    "TALKER": (["recipe=qwen3_omni_sft"], ["recipe=qwen3_vl_sft"]),
    "RESIDUAL": (["recipe=qwen3_omni_talker_sft"], ["recipe=qwen25_omni_talker_sft"]),
    "SPEECH": (["recipe=qwen3_omni_sft", "train.speech_loss=1"], ["recipe=qwen3_omni_sft", "train.speech_loss=0"]),
}  # fmt: skip

# Values that no type tells.
VALUES: dict[str, str] = {
    "model.family": "qwen3_vl", "model.arch": "{new: 1}", "data.train": "digits:heldout", "data.eval": "c.jsonl", "data.bundled": "{augment: 0.5}",
    "lora.targets": "[q_proj]", "embed.dimensions": "[2]", "lora.whole_parts": "[merger]", "lora.rank_pattern": "{q_proj: 4}", "lora.alpha_pattern": "{q_proj: 4}", "parallel.stage_layers": "[1, 1]", "train.lr_scale": "{vision: 0.5}", "size": "tiny", "hardware": "cpu",
    "parallel.plan": "[tp]", "data.template": "{a: 1}", "train.keep_best": "exact_match", "data.encode_in_workers": "true",
    "parallel.overlap_param_gather": "true", "max_shard_size": "2GB", "hub.repo": "me/mine",
    "rl.std_norm": "true", "rl.rewards": "{anls: 1}", "rl.vllm.options": "{a: 1}", "rl.router_replay": "true",
    "rl.ahead": "1", "run.profile": "2:3", "run.profile_ranks": "[1]",
}  # fmt: skip

CASES = [key for key in keys(Recipe).values() if key.key != "recipe"]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose, "gpu_count", lambda: 0)


def value_of(key: Key) -> str:
    """A value of a key, as it is typed, that is not its default and asks for something."""
    if key.key in VALUES:
        return VALUES[key.key]
    if key.choices:
        return next(text for text in key.choices if text != key.default)
    if key.bounds is not None:
        bounds = key.bounds
        found = next(n for n in (2, 3, 0.5, 0.25) if bounds.hold(n) and n != key.default)
        return str(found)
    return show_value(not key.default) if key.type.startswith("bool") else "something"


def loaded(overrides: list[str]) -> Recipe:
    """The recipe of the last `recipe=`, under the overrides that are left."""
    names = [text.partition("=")[2] for text in overrides if text.startswith("recipe=")]
    return load_recipe([*["qwen3_vl_sft"], *names][-1], [text for text in overrides if not text.startswith("recipe=")])


def name_of(when: When) -> str:
    (name,) = [name for name, known in vars(conditions).items() if known is when]
    return name


def sides(key: Key, lacking: When | None) -> list[str]:
    """Overrides under which all conditions of a key hold, except for one."""
    found = [text for when in key.when or () if when not in (lacking, ALWAYS) for text in SIDES[name_of(when)][0]]
    found += [] if lacking is None else SIDES[name_of(lacking)][1]
    return [text for text in found if text.partition("=")[0] != key.key]


@pytest.mark.parametrize("key", CASES, ids=lambda key: key.key)
def test_a_key_is_taken_where_it_has_an_effect_and_refused_where_not(key: Key) -> None:
    assert key.when, (
        f"{key.key}: state when it has an effect in zoo/config/schema: when=ALWAYS, or when=conditions.CONDITION with one of "
        "zoo/config/schema/conditions.py (a new one gets its two sides in SIDES here)"
    )
    typed = f"{key.key}={value_of(key)}"
    with_effect = loaded([*sides(key, None), typed])
    assert key.key in (*with_effect.set_by_user, "size", "hardware")
    refuse_without_effect(with_effect)
    for lacking in key.when:
        if lacking is ALWAYS:
            assert key.key == "model.family" or loaded(["recipe=gemma3_text_dpo_lora", typed])
            continue
        with pytest.raises(ConfigError) as caught:
            loaded([typed, *sides(key, lacking)])
        said = str(caught.value).split("\n")
        others = {text.partition("=")[0] for text in sides(key, lacking)}  # which may lack the same condition
        mistakes = {line.strip().partition("=")[0]: line.strip() for line in said[len(said) > 1 :]}
        assert {key.key} <= set(mistakes) <= {key.key, *others}
        assert len(mistakes) == 1 or said[0] == f"{len(mistakes)} mistakes:"
        assert all("it has no effect" in line for line in mistakes.values())
        own = mistakes[key.key]
        assert f"it has no effect {lacking.lacks}" in own and f"; {lacking.do}, or leave {key.key} out" in own


def test_every_condition_has_its_two_sides() -> None:
    known = {name for name, value in vars(conditions).items() if isinstance(value, When)}
    assert known == set(SIDES), "a new condition gets its two sides in SIDES"
    stated = {when for key in CASES for when in key.when or () if when is not ALWAYS}
    assert {name_of(when) for when in stated} == known


LOSSES = ("nll", "dpo", "ipo", "simpo", "orpo", "kto", "reward")


@pytest.mark.parametrize(
    ("override", "fitting"),
    [
        ("train.beta=0.1", ("dpo", "ipo", "simpo", "orpo", "kto")),
        ("train.reference=start", ("dpo", "ipo", "kto")),
        ("train.label_smoothing=0.1", ("dpo", "simpo")),
        ("train.simpo_gamma=0", ("simpo",)),
        ("train.desirable_weight=1", ("kto",)),
        ("train.center_rewards=0.01", ("reward",)),
    ],
)
def test_keys_of_losses(override: str, fitting: tuple[str, ...]) -> None:
    """The default typed out is refused, too: whoever types it expects another loss."""
    for loss in LOSSES:
        given = [f"train.loss={loss}", override]
        if loss in fitting:
            assert load_recipe("qwen3_vl_sft", given)
        else:
            with pytest.raises(ConfigError, match=r"^train\.\w+=\S+: it has no effect under"):
                load_recipe("qwen3_vl_sft", given)


def test_a_value_that_asks_for_nothing_is_taken_anywhere() -> None:
    off = (
        "train.aux_loss=0", "train.z_loss=0.0", "train.mtp_loss=0", "parallel.ep=1", "parallel.vpp=1", "parallel.sp=false", "lora.init=null", "lora.merge_first=null",
        "parallel.stage_layers=[]", "train.eval_every=0", "train.keep_best=null", "log.predictions=0", "data.workers=0", "data.augment=0",
        "train.micro_batch=1", "lora.base_dtype=model", "parallel.dispatch=alltoall", "engine.delta_rule=auto", "parallel.cp_split=auto",
    )  # fmt: skip
    assert load_recipe("gemma3_text_sft", ["data.train=a.jsonl", *off])


def test_what_files_of_zoo_set_is_never_refused(tmp_path: Path) -> None:
    for name, *more in (
        ("qwen3_vl_dpo", "train.loss=nll"), ("demo", "train.optimizer=adamw"), ("qwen3_vl_lora", "lora.rank=0"),
        ("qwen3_vl_moe_sft", "size=tiny"), ("qwen3_vl_sft", "data.train=a.jsonl", "data.eval=none"), ("qwen3_omni_sft", "hardware=8xh200"),
        ("qwen3_vl_sft", "train.schedule=constant"), ("demo", "nproc=1"),
    ):  # fmt: skip
        recipe = load_recipe(name, more)
        refuse_without_effect(recipe)
        save_recipe(recipe, tmp_path / "config.yaml")
        assert load_recipe(tmp_path / "config.yaml", ["train.lr=1"]).set_by_user == {"train.lr"}
    with pytest.raises(ConfigError, match=r"^train.beta=0.2: it has no effect"):
        load_recipe(tmp_path / "config.yaml", ["train.beta=0.2"])


def test_a_users_file_is_named(tmp_path: Path) -> None:
    mine = write(tmp_path / "mine.yaml", "base: qwen3_vl_sft\nlora: {alpha: 16}\n")
    with pytest.raises(ConfigError) as caught:
        load_recipe(mine)
    assert str(caught.value) == (
        f"{mine}: lora.alpha=16.0: it has no effect without adapters (lora.rank=0); set lora.rank, or leave lora.alpha out"
    )
    assert load_recipe(mine, ["lora.rank=4"]).lora.alpha == 16
    further = write(tmp_path / "further.yaml", f"base: {mine}\nlora: {{rank: 4}}\n")
    assert load_recipe(further).lora.rank == 4
    root = write(tmp_path / "root.yaml", "model: {family: qwen3_vl}\ntrain: {steps: 1, momentum: 0.9}\n")
    with pytest.raises(ConfigError, match=r"root\.yaml: train\.momentum=0\.9: it has no effect"):
        load_recipe(root)
    with pytest.raises(ConfigError, match=r"^lora\.targets=\[q_proj\]: it has no effect"):
        load_recipe("qwen3_vl_sft", ["lora.targets[0]=q_proj"])


def made() -> Iterator[tuple[str, Any]]:
    """Recipes of programs with a key that has no effect."""
    recipe = load_recipe("qwen3_vl_sft", ["size=tiny"])
    yield "lora.alpha", recipe.replace({"lora.alpha": 64})
    yield "lora.alpha", recipe.replace(lora={"alpha": 64}).replace(nproc=1)
    yield "lora.dropout", recipe.replace(lora=zoo.LoraConfig(dropout=0.5))
    yield (
        "train.momentum",
        recipe.replace({"train.optimizer": "muon", "train.momentum": 0.5}).replace({"train.optimizer": "adamw"}),
    )
    yield (
        "train.simpo_gamma",
        zoo.Recipe(
            size="tiny", model=zoo.ModelConfig(family="qwen3_vl"), train=zoo.TrainConfig(steps=1, simpo_gamma=0.7)
        ),
    )


@pytest.mark.parametrize(("key", "recipe"), list(made()))
def test_a_program_is_told_when_the_recipe_is_used(key: str, recipe: Recipe) -> None:
    for use in (prepare, lambda used: zoo.plan(used, 1)):
        with pytest.raises(ConfigError, match=f"^{key}=.* it has no effect"):
            use(recipe)


def test_a_program_may_set_one_key_after_the_other() -> None:
    recipe = load_recipe("qwen3_vl_sft").replace({"lora.alpha": 64}).replace({"lora.rank": 8})
    refuse_without_effect(recipe)
    assert {"lora.alpha", "lora.rank"} <= recipe.set_by_user
    same = recipe.replace(train=recipe.train, data=recipe.data)
    assert same.set_by_user == recipe.set_by_user and same == recipe


def test_adapters_on_random_weights_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    from zoo.cli.main import main

    assert main(["show", "recipe=qwen3_vl_lora"]) == 0
    assert "# lora.rank=16 with model.init=random: the weights under the adapters are random" in capsys.readouterr().out
    assert main(["show", "recipe=qwen3_vl_sft"]) == 0
    assert "are random" not in capsys.readouterr().out


def test_the_schema_shows_when_a_key_has_an_effect(capsys: pytest.CaptureFixture[str]) -> None:
    from zoo.cli.main import main

    assert main(["show", "--schema"]) == 0
    assert "no effect without adapters" in capsys.readouterr().out
