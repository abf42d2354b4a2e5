"""A recipe from its files and overrides: what wins, and what round-trips."""

import json
from pathlib import Path

import pytest
from support.recipes import NAME, error_of, write

from zoo.config import compose
from zoo.config.compose import load_recipe, resolve, save_recipe
from zoo.config.schema import Recipe, TrainConfig
from zoo.errors import ConfigError


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose, "gpu_count", lambda: 0)


# --- what wins


def test_the_size_is_tiny_without_a_gpu_and_the_published_one_with(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = resolve(NAME)
    assert resolved.recipe.size == "tiny"
    assert resolved.size_why == "no GPU is here; published: size=30b-a3b"
    assert resolve(NAME, ["size=30b-a3b"]).size_why == "given"
    monkeypatch.setattr(compose, "gpu_count", lambda: 8)
    resolved = resolve(NAME)
    assert resolved.recipe.size == "30b-a3b"
    assert "a GPU is here" in resolved.size_why


def test_a_recipe_may_have_a_tiny_size_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve("qwen35_vl_moe_sft").recipe.size == "tiny-moe"
    assert resolve("qwen35_vl_sft").recipe.size == "tiny"
    monkeypatch.setattr(compose, "gpu_count", lambda: 8)
    assert resolve("qwen35_vl_moe_sft").recipe.size == "35b-a3b"


def test_overlays_stand_over_the_recipe_and_overrides_over_all() -> None:
    recipe = load_recipe(NAME, ["hardware=cpu", "--train.lr=3e-4", "parallel.tp=2", "export=false"])
    assert recipe.recipe == NAME
    assert recipe.hardware == "cpu"
    assert recipe.engine.precision == "fp32"
    assert recipe.train.lr == 3e-4
    assert recipe.parallel.tp == 2
    assert recipe.export is False
    assert recipe.model.arch["model_type"] == "qwen3_omni_moe"


def test_an_architecture_takes_overrides_at_any_depth_unchecked() -> None:
    recipe = load_recipe(NAME, ["model.arch.thinker_config.text_config.num_hidden_layers=2", "model.arch.new.key=1"])
    assert recipe.model.arch["thinker_config"]["text_config"]["num_hidden_layers"] == 2
    assert recipe.model.arch["thinker_config"]["text_config"]["hidden_size"] == 128
    assert recipe.model.arch["new"] == {"key": 1}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.train=[a.jsonl,b.jsonl]", ["a.jsonl", "b.jsonl"]),
        ("data.train=a.jsonl", ["a.jsonl"]),
        ("data.train=digits:train", ["digits:train"]),
    ],
)
def test_a_list_is_given_as_a_list_or_as_one_text(override: str, expected: list[str]) -> None:
    assert load_recipe(NAME, [override]).data.train == expected


def test_null_and_a_whole_section_can_be_given() -> None:
    recipe = load_recipe(NAME, ["packing.pad_to=null", "train={steps: 3, lr: 1}", "run.dir=a=b"])
    assert recipe.packing.pad_to is None
    assert (recipe.train.steps, recipe.train.lr) == (3, 1.0)
    assert recipe.run.dir == "a=b"


def test_steps_and_epochs_replace_each_other_in_a_later_layer() -> None:
    recipe = load_recipe(NAME, ["train.epochs=2"])
    assert (recipe.train.steps, recipe.train.epochs) == (None, 2.0)
    recipe = load_recipe(NAME, ["train.epochs=2", "train.steps=5"])
    assert (recipe.train.steps, recipe.train.epochs) == (5, 2.0)  # a contradiction is left for validate to refuse


def test_the_users_file_stands_over_the_size_of_its_base(tmp_path: Path) -> None:
    mine = write(tmp_path / "mine.yaml", f"base: {NAME}\nsize: tiny\ntrain: {{lr: 7.0e-4}}\n")
    recipe = load_recipe(mine)
    assert recipe.recipe == mine
    assert recipe.size == "tiny"
    assert recipe.train.lr == 7e-4
    assert recipe.model.arch
    assert load_recipe(mine, ["train.lr=1"]).train.lr == 1.0


def test_a_base_may_be_a_file_beside_the_users(tmp_path: Path) -> None:
    write(tmp_path / "first.yaml", f"base: {NAME}\ntrain: {{lr: 1, min_lr: 0.5}}\n")
    second = write(tmp_path / "second.yaml", "base: first.yaml\ntrain: {lr: 2}\n")
    recipe = load_recipe(second)
    assert (recipe.train.lr, recipe.train.min_lr) == (2.0, 0.5)


def test_a_file_with_its_own_architecture_needs_no_size(tmp_path: Path) -> None:
    resolved = resolve(write(tmp_path / "r.yaml", "model: {arch: {num_hidden_layers: 2}}\ntrain: {steps: 1}\n"))
    assert resolved.recipe.size is None
    assert resolved.size_why == "architecture given in model.arch"


def test_the_architecture_is_that_of_the_weights_folder(tmp_path: Path) -> None:
    write(tmp_path / "config.json", json.dumps({"model_type": "x", "num_hidden_layers": 7}))
    resolved = resolve(NAME, [f"model.init={tmp_path}"])
    assert resolved.recipe.model.arch == {"model_type": "x", "num_hidden_layers": 7}
    assert resolved.recipe.size is None
    assert resolved.size_why == "architecture of model.init"
    recipe = load_recipe(NAME, [f"model.init={tmp_path}", "size=tiny", "model.arch.num_hidden_layers=3"])
    assert recipe.size == "tiny"
    assert recipe.model.arch == {"model_type": "x", "num_hidden_layers": 3}


def earlier_run(folder: Path, name: str = "qwen3_vl_sft", *overrides: str) -> Path:
    """A run's recipe and the parts of its checkpoint that a recipe is composed from; returns the checkpoint."""
    recipe = load_recipe(name, ["size=tiny", *overrides])
    save_recipe(recipe, folder / "config.yaml")
    checkpoint = folder / "checkpoints" / "iter_2"
    (checkpoint / "hf").mkdir(parents=True)
    write(checkpoint / "hf" / "config.json", json.dumps(recipe.model.arch))
    write(checkpoint / "state.json", json.dumps({"step": 2, "model": {"family": recipe.model.family}}))
    return checkpoint


def test_the_sizes_of_a_run_come_with_its_weights(tmp_path: Path) -> None:
    checkpoint = earlier_run(tmp_path, "qwen3_vl_sft", "data.max_pixels=5000", "train.lr=3e-3")
    for init in (tmp_path, checkpoint):
        resolved = resolve("qwen3_vl_sft", [f"model.init={init}", "data.max_pixels=900"])
        recipe = resolved.recipe
        assert recipe.model.arch == load_recipe("qwen3_vl_sft", ["size=tiny"]).model.arch
        assert (recipe.packing.budget, recipe.train.global_batch, recipe.nproc_cpu) == (1024, 2, 2)
        assert recipe.data.max_pixels == 900  # as the user says
        assert recipe.train.lr == load_recipe("qwen3_vl_sft", ["size=2b"]).train.lr
        assert "packing.budget=1024, train.global_batch=2, nproc_cpu=2" in resolved.taken
        assert "pixels" not in resolved.taken
    own = write(tmp_path / "own.yaml", f"base: qwen3_vl_sft\nmodel:\n  init: {tmp_path}\npacking: {{budget: 77}}")
    assert resolve(own).recipe.packing.budget == 77
    assert "packing" not in resolve(own).taken
    sized = resolve("qwen3_vl_sft", [f"model.init={tmp_path}", "size=2b"])
    assert sized.recipe.packing.budget != 1024 and not sized.taken
    saved = tmp_path / "saved.yaml"
    save_recipe(resolve("qwen3_vl_sft", [f"model.init={tmp_path}", "packing.budget=99"]).recipe, saved)
    assert resolve(str(saved)).recipe.packing.budget == 99


def test_what_a_machine_decides_is_not_taken_from_a_run(tmp_path: Path) -> None:
    earlier_run(tmp_path, "qwen3_vl_sft", "engine.precision=fp32")
    init = f"model.init={tmp_path}"
    assert resolve("qwen3_vl_sft", [init]).recipe.engine.precision == "fp32"
    on_gpus = resolve("qwen3_vl_sft", [init, "hardware=8xh200"]).recipe
    assert on_gpus.engine.precision == "bf16" and "batch" in on_gpus.parallel.plan
    assert on_gpus.train.global_batch == load_recipe("qwen3_vl_sft", ["size=2b"]).train.global_batch
    assert on_gpus.packing.budget == 1024


def test_a_run_of_another_family_is_refused(tmp_path: Path) -> None:
    earlier_run(tmp_path, "qwen3_vl_sft")
    message = error_of(f"model.init={tmp_path}")
    assert "qwen3_vl" in message and "qwen3_omni" in message and "qwen3_vl_moe_sft" in message
    (tmp_path / "config.yaml").unlink()
    assert not resolve("qwen3_vl_sft", [f"model.init={tmp_path}"]).taken.count("packing")


# --- references to the environment


def test_the_environment_is_read_where_it_is_written_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWS", "/data/rows")
    monkeypatch.setenv("STEPS", "7")
    mine = write(
        tmp_path / "mine.yaml",
        f"base: {NAME}\ndata: {{train: ['${{oc.env:ROWS}}/a.jsonl', {{path: '${{oc.env:ROWS}}'}}]}}\n",
    )
    recipe = load_recipe(mine, ["train.steps=${oc.env:STEPS}", "run.dir=${oc.env:NOWHERE,runs}/x"])
    assert recipe.data.train == ["/data/rows/a.jsonl", {"path": "/data/rows"}]
    assert (recipe.train.steps, recipe.run.dir) == (7, "runs/x")
    save_recipe(recipe, tmp_path / "config.yaml")
    monkeypatch.delenv("ROWS")
    assert load_recipe(tmp_path / "config.yaml") == recipe
    message = error_of(name=mine)
    assert message.startswith(f"{mine}: data: the environment variable ROWS is not set; set it, or give")


def test_a_dollar_and_a_brace_may_be_meant(tmp_path: Path) -> None:
    recipe = load_recipe(NAME, [r"run.dir=\${x}"])
    assert recipe.run.dir == "${x}"
    save_recipe(recipe, tmp_path / "config.yaml")
    assert load_recipe(tmp_path / "config.yaml") == recipe
    assert recipe.replace({"train.lr": 1}).run.dir == "${x}"


# --- entries of lists


def test_an_entry_of_a_list_and_a_key_of_it() -> None:
    whole = "data.train=[a.jsonl, {path: b.jsonl, weight: 1}]"
    recipe = load_recipe(NAME, ["data.train[0].weight=2", "data.train[1].weight=0.5", whole])
    assert recipe.data.train == [{"path": "a.jsonl", "weight": 2}, {"path": "b.jsonl", "weight": 0.5}]
    assert load_recipe(NAME, [whole, "data.train[1]=c.jsonl"]).data.train == ["a.jsonl", "c.jsonl"]
    assert load_recipe(NAME, ["data.eval={path: a}"]).data.eval == [{"path": "a"}]
    assert recipe.replace({"data.train[0].weight": 3}).data.train[0]["weight"] == 3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train[1]=x", "data.train[1]: data.train has 1 entries, counted from 0; give a whole list, "),
        ("train.lr[0]=1", "train.lr[0]: train.lr is no list; lists are "),
        ("data.trian[0]=x", "data.trian[0]: data.trian is no list; lists are "),
        ("data.train[0]=3",
         "data.train=[3]: wanted a path, a mapping such as {path: rows.jsonl, format: messages}, or a list of these"),
    ],
)  # fmt: skip
def test_a_mistake_in_an_entry(override: str, message: str) -> None:
    assert error_of(override).startswith(message)


# --- saved and loaded again


def test_a_saved_recipe_resolves_to_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(
        NAME, ["hardware=cpu", "train.lr=1.2345678901234e-5", "run.dir='1e3'", "data.train=['no', 'a:b']"]
    )
    save_recipe(recipe, tmp_path / "config.yaml")
    monkeypatch.setattr(compose, "gpu_count", lambda: 8)  # another machine would choose another size
    assert load_recipe(tmp_path / "config.yaml") == recipe
    assert load_recipe(tmp_path / "config.yaml", ["train.lr=1"]) == recipe.replace({"train.lr": 1})


def test_a_recipe_built_by_hand_round_trips(tmp_path: Path) -> None:
    recipe = Recipe(train=TrainConfig(steps=3))
    save_recipe(recipe, tmp_path / "config.yaml")
    assert load_recipe(tmp_path / "config.yaml") == recipe


def test_replace_checks_like_an_override() -> None:
    recipe = Recipe().replace({"parallel.tp": 2, "model.arch": {"a": 1}})
    assert recipe.parallel.tp == 2
    assert recipe.replace() == recipe
    with pytest.raises(ConfigError, match=r"^parallel\.tp=x: wanted a whole number from 1 to 100,000$"):
        recipe.replace({"parallel.tp": "x"})


# --- tasks


def test_a_task_stands_between_a_recipe_and_the_file_that_names_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("base: qwen3_vl_sft\ntask: dpo\ntrain: {beta: 0.3}\n")
    recipe = resolve(str(file)).recipe
    assert (recipe.train.loss, recipe.train.beta, recipe.train.lr) == ("dpo", 0.3, 5e-7)
    file.write_text("base: qwen3_vl_sft\ntask: dop\n")
    assert "task: dop: no such task; there are sft, dpo, embed, grpo, reward" in error_of(name=str(file))
    file.write_text("task: dpo\nmodel: {family: qwen3_vl}\n")
    assert "task: wanted a base or a family" in error_of(name=str(file))


def test_a_recipe_is_a_family_a_task_and_an_adapter(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("family: qwen3_vl_moe\ntask: dpo\nadapter: lora\n")
    recipe = load_recipe("qwen3_vl_moe_dpo_lora")
    assert load_recipe(str(file)).replace({"recipe": recipe.recipe}) == recipe
    assert load_recipe("qwen3_vl_moe_sft", ["task=dpo", "adapter=lora"]) == recipe
    assert load_recipe("qwen3_vl_moe_lora", {"task": "reward", "adapter": "none"}) == load_recipe("qwen3_vl_moe_reward")
    assert (recipe.lora.rank, recipe.train.reference, recipe.train.lr) == (8, "base", 5e-6)
    mine = load_recipe(str(file), ["adapter=none"])
    assert (mine.lora.rank, mine.train.lr) == (0, 5e-7)
    file.write_text("family: qwen3_omni\ntrain: {lr: 0.125}\n")
    assert load_recipe(str(file), ["adapter=lora"]).train.lr == 0.125
    file.write_text("family: qwen3_vll\n")
    assert "family: qwen3_vll: no such family of recipes" in error_of(name=str(file))
    file.write_text("base: qwen3_vl_sft\nfamily: llava\n")
    assert "family: it stands in the place of a recipe" in error_of(name=str(file))
    file.write_text("base: qwen3_vl_sft\nadapter: qlora\n")
    assert "adapter: qlora: no such adapter; there are none, lora" in error_of(name=str(file))
    assert "adapter=qlora: no such adapter" in error_of("adapter=qlora")


@pytest.mark.parametrize(
    ("name", "task", "chosen"),
    [
        ("qwen3_vl_sft", "dpo", "qwen3_vl_dpo"),
        ("qwen3_vl_lora", "dpo", "qwen3_vl_dpo_lora"),
        ("qwen35_vl_moe_sft", "reward", "qwen35_vl_moe_reward"),
        ("qwen3_vl_dpo", "reward", "qwen3_vl_reward"),
        ("qwen3_asr_dpo_lora", "sft", "qwen3_asr_lora"),
        ("gemma3_dpo", "dpo", "gemma3_dpo"),
        ("gemma3_sft", "sft", "gemma3_sft"),
    ],
)
def test_a_task_chooses_the_recipe_of_the_same_base(name: str, task: str, chosen: str) -> None:
    for override in (f"task={task}", f"--task={task}"):
        assert load_recipe(name, [override]) == load_recipe(chosen)


def test_a_task_stands_below_a_users_file(tmp_path: Path) -> None:
    mine = write(tmp_path / "mine.yaml", "base: qwen3_vl_lora\ntrain: {lr: 0.125}\n")
    recipe = load_recipe(mine, ["task=dpo"])
    assert (recipe.train.loss, recipe.train.lr, recipe.train.reference) == ("dpo", 0.125, "base")
    write(tmp_path / "mine.yaml", "base: qwen3_vl_sft\ntask: dpo\ntrain: {lr: 0.125}\n")
    assert load_recipe(mine, ["task=reward"]).train.loss == "reward"
    sft = load_recipe(mine, ["task=sft"]).train
    assert (sft.loss, sft.lr, sft.weight_decay) == ("nll", 0.125, load_recipe("qwen3_vl_sft").train.weight_decay)
    own = write(tmp_path / "own.yaml", "model: {family: qwen3_vl}\ntrain: {steps: 1, weight_decay: 1}\n")
    reward = load_recipe(own, ["task=reward"])
    assert (reward.recipe, reward.train.loss, reward.train.weight_decay) == (own, "reward", 0.0)
    write(tmp_path / "own.yaml", "base: qwen3_vl_sft\ntrain: {loss: ipo}\n")
    assert "own.yaml has train.loss=ipo, another task" in error_of("task=sft", name=own)
    assert load_recipe("demo", ["task=dpo"]).train.loss == "dpo"
