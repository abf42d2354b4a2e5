"""A recipe from its files and overrides: what wins, what round-trips, and what each mistake is told."""

import json
from pathlib import Path

import pytest

from zoo.config import compose, files
from zoo.config.compose import load_recipe, resolve, save_recipe
from zoo.config.files import root_recipes
from zoo.config.schema import Recipe, TrainConfig
from zoo.errors import ConfigError, UserError

NAME = "qwen3_omni_sft"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose, "gpu_count", lambda: 0)


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def error_of(*overrides: str, name: str = NAME) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(name, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


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
    recipe = load_recipe(
        NAME, ["model.arch.thinker_config.text_config.num_hidden_layers=2", "model.arch.new.key=1"]
    )
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
    assert (recipe.train.steps, recipe.train.epochs) == (
        5,
        2.0,
    )  # a contradiction is left for validate to refuse


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
    resolved = resolve(
        write(tmp_path / "r.yaml", "model: {arch: {num_hidden_layers: 2}}\ntrain: {steps: 1}\n")
    )
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
    own = write(
        tmp_path / "own.yaml", f"base: qwen3_vl_sft\nmodel:\n  init: {tmp_path}\npacking: {{budget: 77}}"
    )
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
    assert "qwen3_vl" in message and "qwen3_omni" in message and "qwen3_vl_lora" in message
    (tmp_path / "config.yaml").unlink()
    assert not resolve("qwen3_vl_sft", [f"model.init={tmp_path}"]).taken.count("packing")


# --- references to the environment


def test_the_environment_is_read_where_it_is_written_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        (
            "data.train[0]=3",
            "data.train=[3]: wanted a path, a mapping such as {path: rows.jsonl, format: messages}, or a list of these",
        ),
    ],
)
def test_a_mistake_in_an_entry(override: str, message: str) -> None:
    assert error_of(override).startswith(message)


# --- hardware


def test_hardware_is_a_number_of_a_kind() -> None:
    recipe = load_recipe(NAME, ["size=30b-a3b", "hardware=2x8xh200"])
    assert (recipe.machine.nodes, recipe.machine.gpus, recipe.machine.memory_gb) == (2, 8, 141)
    assert recipe.hardware == "2x8xh200"
    assert recipe.engine.precision == "bf16"
    assert load_recipe(NAME, ["hardware=4xh100"]).machine.gpus == 4
    near = error_of("hardware=8xh210")
    assert near.startswith("hardware=8xh210: no such hardware; nearest: 8x") and "8xh200" in near
    assert error_of("hardware=0xh100") == "hardware=0xh100: wanted at least one of them"
    assert (
        error_of("hardware=2xcpu") == "hardware=2xcpu: cpu is no GPU to have several of; write hardware=cpu"
    )


@pytest.mark.parametrize(
    ("hardware", "gpu", "memory"),
    [
        ("8xa100", "a100", 80),
        ("4xa100-40", "a100-40", 40),
        ("8xb200", "b200", 180),
        ("4xl40s", "l40s", 48),
        ("2xrtx4090", "rtx4090", 24),
        ("8x80gb", "80gb", 80),
        ("H100", "h100", 80),
        ("2x8xH100-80GB", "h100", 80),
    ],
)
def test_any_gpu_by_name_or_by_memory(hardware: str, gpu: str, memory: float) -> None:
    recipe = load_recipe(NAME, [f"hardware={hardware}"])
    assert (recipe.machine.gpu, recipe.machine.memory_gb) == (gpu, memory)
    assert recipe.engine.precision == "bf16" and recipe.parallel.plan


def test_a_gpu_that_there_is_not() -> None:
    assert "nearest: 4xrtx4090" in error_of("hardware=4x4090")
    assert "any other GPU by its memory: 8x80gb" in error_of("hardware=8xtpu5")
    assert error_of("hardware=8x0gb").startswith("hardware=8x0gb: no such hardware")
    assert "h200" in error_of("hardware=h20o")


def test_what_is_given_is_not_planned(tmp_path: Path) -> None:
    every = ["tp", "pp", "cp", "ep", "recompute", "memory", "batch"]
    assert load_recipe(NAME, ["hardware=8xh100"]).parallel.plan == every
    given = ["hardware=8xh100", "parallel.tp=2", "train.global_batch=4", "engine.recompute=full"]
    assert load_recipe(NAME, given).parallel.plan == ["pp", "cp", "ep", "memory"]
    given = ["hardware=8xh100", "parallel.stage_layers=[1,3]", "train.exp_avg_sq_dtype=bf16"]
    assert load_recipe(NAME, given).parallel.plan == ["tp", "cp", "ep", "recompute", "batch"]
    assert load_recipe(NAME, ["hardware=8xh100", "parallel.plan=[]"]).parallel.plan == []
    mine = write(tmp_path / "mine.yaml", f"base: {NAME}\nparallel: {{pp: 2}}\n")
    assert "pp" not in load_recipe(mine, ["hardware=8xh100"]).parallel.plan


def test_hardware_auto_is_what_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_recipe(NAME, ["hardware=auto"]).engine.precision == "fp32"
    assert load_recipe(NAME).machine.gpus is None
    monkeypatch.setattr(compose, "gpu_count", lambda: 4)
    monkeypatch.setattr(files, "gpu_count", lambda: 4)
    for size, memory in ((150_754_000_000, 150.8), (85_520_000_000, 85.5), (25_000_000_000, 25.0)):
        monkeypatch.setattr(files, "gpu_memory", lambda size=size: size)
        recipe = load_recipe(NAME)
        assert (recipe.hardware, recipe.machine.gpus, recipe.machine.memory_gb) == ("auto", 4, memory)
        assert recipe.parallel.plan and recipe.machine.gpu is None
    monkeypatch.setattr(files, "gpu_name", lambda: "NVIDIA H100 80GB HBM3")
    assert load_recipe(NAME).machine.gpu == "h100"
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert load_recipe(NAME).machine.nodes == 4


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


# --- what mistakes are told


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps=abc", "train.steps=abc: wanted a whole number from 1 to 1,000,000,000 or null"),
        ("train.steps=1.5", "train.steps=1.5: wanted a whole number from 1 to 1,000,000,000 or null"),
        ("train.lr=fast", "train.lr=fast: wanted a number from 0 to 100"),
        ("train.lr=null", "train.lr=null: wanted a number from 0 to 100"),
        ("export=maybe", "export=maybe: wanted true or false"),
        ("parallel.sp=2", "parallel.sp=2: wanted true or false or null"),
        ("run.dir=[a]", "run.dir=[a]: wanted a text or null"),
        ("parallel.planned=[[]]", "parallel.planned=[[]]: wanted a text or a list of texts"),
        ("lora.targets=[{a: b}]", "lora.targets=[{a: b}]: wanted a text or a list of texts"),
        (
            "parallel.stage_layers=[[1]]",
            "parallel.stage_layers=[[1]]: wanted a list of whole numbers from 1 to 100,000",
        ),
        (
            "train.lr_scale={vision: [1]}",
            "train.lr_scale={vision: [1]}: wanted a mapping of names to numbers from 0 to 1,000,000",
        ),
        ("model.arch=big", "model.arch=big: wanted a mapping"),
        (
            "data.train=[a,null]",
            "data.train=[a, null]: wanted a path, a mapping such as {path: rows.jsonl, format: messages}, or a list of these",
        ),
        ("train=3", "train=3: train is a section; set its keys, train.<key>=value"),
        ("packing.mode=bshd", "packing.mode=bshd: wanted one of thd, none"),
        ("data.on_error=stop", "data.on_error=stop: wanted one of raise, skip"),
        ("data.overlong=cut", "data.overlong=cut: wanted one of error, drop, truncate_text, shrink"),
        ("engine.backend=jax", "engine.backend=jax: wanted one of auto, te, torch"),
        ("engine.precision=fp8", "engine.precision=fp8: wanted one of fp32, bf16 or null"),
        ("engine.recompute=all", "engine.recompute=all: wanted one of none, selective, full"),
        ("train.stepz=3", "train.stepz: no such key; nearest: train.steps"),
        ("lr=3", "lr: no such key; nearest: train.lr"),
        ("trian.lr=3", "trian.lr: no such key; nearest: train.lr"),
        ("train.steps.x=3", "train.steps.x: no such key; nearest: train.steps"),
        ("zzz.zzz=3", "zzz.zzz: no such key; `zoo show --schema` lists the keys"),
        ("train.steps", "train.steps: an override is written key=value, such as train.steps=100"),
        ("=3", "=3: an override is written key=value, such as train.steps=100"),
        ("recipe=x", "recipe=x: the recipe is named once, before its overrides"),
        ("size=tini", "size=tini: no such size; nearest: tiny"),
        ("hardware=cpuu", "hardware=cpuu: no such hardware; nearest: cpu"),
        ("size=./x.yaml", "size=./x.yaml: no such file; names that are known: 30b-a3b, tiny"),
    ],
)
def test_a_mistake_in_an_override(override: str, message: str) -> None:
    assert error_of(override) == message


def test_values_that_cannot_be_read() -> None:
    assert error_of("train.steps=[1").startswith("train.steps=[1: the value is no valid YAML (")
    assert error_of("run.dir=${x").startswith("run.dir: ${x: no such reference; ")
    assert error_of("run.dir=${nowhere}").startswith(
        "run.dir: ${nowhere}: no such reference; ${oc.env:NAME} is"
    )


def test_an_unknown_family_is_named_before_its_sizes() -> None:
    with pytest.raises(UserError, match=r"^model.family: no family 'qwen3_omi'; nearest: "):
        load_recipe(NAME, ["model.family=qwen3_omi"])


def test_a_file_without_a_family(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.yaml", "train: {steps: 1}\n")
    first = root_recipes()[0]
    wanted = f"model.family is not set; write `base: {first}` (or another recipe) as its first line"
    assert error_of(name=file) == f"{file}: {wanted}"
    write(tmp_path / "mine.yaml", "trian: {steps: 1}\n")
    assert error_of(name=file).startswith(f"{file}: trian.steps: no such key; nearest: train.steps")


def test_an_unknown_recipe() -> None:
    wanted = "recipe=qwen3_omni_stf: no such recipe; nearest: qwen3_omni_sft"
    assert error_of(name="qwen3_omni_stf").startswith(wanted)
    assert error_of(name="./q.yaml").startswith("recipe=./q.yaml: no such file; recipes by name: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train:\n  lr: [1\n", ":4: no valid YAML: "),
        ("train:\n  lr: 1\n  lr: 2\n", ":4: no valid YAML: a key is given twice"),
        ("train:\n  step: 1\n", ": train.step: no such key; nearest: train.steps"),
        ("train:\n  lr: fast\n", ": train.lr=fast: wanted a number"),
        (f"recipe: {NAME}\n", ": recipe: a file names the recipe it stands on as base: NAME"),
        ("base: nothing\n", "recipe=nothing: no such recipe"),
        ("run:\n  dir: ${\n", ": "),
    ],
)
def test_a_mistake_in_a_file(text: str, message: str, tmp_path: Path) -> None:
    file = write(tmp_path / "mine.yaml", "model: {family: qwen3_omni}\n" + text)
    found = error_of("size=tiny", name=file)
    assert message in found
    if not message.startswith("recipe"):
        assert found.startswith(file)


def test_a_file_that_is_no_mapping(tmp_path: Path) -> None:
    file = write(tmp_path / "x.yaml", "- a\n")
    assert error_of(name=file) == f"{file}: wanted keys and values (`train:` and so on), found a list"


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    assert "no text in UTF-8" in error_of(name=str(tmp_path / "x.yaml"))


def test_a_base_that_leads_back(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", "base: b.yaml\n")
    write(tmp_path / "b.yaml", "base: a.yaml\n")
    assert "leads back to itself" in error_of(name=str(tmp_path / "a.yaml"))


def test_a_resolved_recipe_takes_no_overlay(tmp_path: Path) -> None:
    save_recipe(load_recipe(NAME), tmp_path / "config.yaml")
    message = error_of("size=tiny", name=str(tmp_path / "config.yaml"))
    assert message.startswith("size=tiny: ")
    assert "is a resolved recipe" in message


def test_a_broken_config_of_the_weights(tmp_path: Path) -> None:
    write(tmp_path / "config.json", "{")
    assert "its JSON can't be read" in error_of(f"model.init={tmp_path}")
    write(tmp_path / "config.json", "[]")
    assert "wanted a JSON object" in error_of(f"model.init={tmp_path}")


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("thinker_config.text_config.hiden_size", "model.arch.thinker_config.text_config.hidden_size"),
        ("text_config.hidden_size", "model.arch.thinker_config"),
    ],
)
def test_a_misspelt_key_of_the_architecture(key: str, nearest: str) -> None:
    message = error_of(f"model.arch.{key}=64")
    assert message == f"model.arch.{key}: no such key; nearest: {nearest}"


def test_a_key_that_the_architecture_leaves_to_its_default_may_be_set() -> None:
    arch = load_recipe(NAME, ["size=tiny", "model.arch.thinker_config.audio_config.dropout=0.1"]).model.arch
    assert arch["thinker_config"]["audio_config"]["dropout"] == 0.1


# --- tasks


def test_a_task_stands_between_a_recipe_and_the_file_that_names_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("base: qwen3_vl_sft\ntask: dpo\ntrain: {beta: 0.3}\n")
    recipe = resolve(str(file)).recipe
    assert (recipe.train.loss, recipe.train.beta, recipe.train.lr) == ("dpo", 0.3, 5e-7)
    file.write_text("base: qwen3_vl_sft\ntask: dop\n")
    assert "task: no such task; nearest: dpo" in error_of(name=str(file))
    file.write_text("task: dpo\nmodel: {family: qwen3_vl}\n")
    assert "task: wanted a base" in error_of(name=str(file))
