"""What a mistake in a recipe, its files or its overrides is told."""

from pathlib import Path

import pytest
from support.recipes import NAME, error_of, write

from zoo.config import compose
from zoo.config.compose import load_recipe, save_recipe
from zoo.config.files import root_recipes
from zoo.errors import ConfigError, UserError
from zoo.registry import get_family


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose, "gpu_count", lambda: 0)


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
        ("parallel.stage_layers=[[1]]", "parallel.stage_layers=[[1]]: wanted a list of whole numbers from 1 to 100,000"),
        ("train.lr_scale={vision: [1]}",
         "train.lr_scale={vision: [1]}: wanted a mapping of names to numbers from 0 to 1,000,000"),
        ("model.arch=big", "model.arch=big: wanted a mapping"),
        ("data.train=[a,null]",
         "data.train=[a, null]: wanted a path, a mapping such as {path: rows.jsonl, format: messages}, or a list of these"),
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
        ("task=dop", "task=dop: no such task; there are sft, dpo, embed, grpo, reward"),
        ("task=", "task=null: no such task; there are sft, dpo, embed, grpo, reward"),
        ("task=[dpo]", "task=[dpo]: no such task; there are sft, dpo, embed, grpo, reward"),
        ("--task.name=dpo", "task={name: dpo}: no such task; there are sft, dpo, embed, grpo, reward"),
        ("base=x", "base=x: it stands in a recipe file; name the recipe itself as recipe=NAME"),
        ("published_size=4b", "published_size=4b: it stands in a recipe file; size=NAME chooses the size of a run"),
        ("--tiny_size=4b", "tiny_size=4b: it stands in a recipe file; size=NAME chooses the size of a run"),
        ("description.a=1", "description={a: 1}: it describes a recipe file and sets nothing; leave it out"),
        ("resolved=false", "resolved=false: it stands in the config.yaml of a run, which zoo writes; leave it out"),
        ("size=tini", "size=tini: no such size; nearest: tiny"),
        ("hardware=cpuu", "hardware=cpuu: no such hardware; nearest: cpu"),
        ("size=./x.yaml", "size=./x.yaml: no such file; names that are known: tiny, 30b-a3b"),
    ],
)  # fmt: skip
def test_a_mistake_in_an_override(override: str, message: str) -> None:
    assert error_of(override) == message


def test_values_that_cannot_be_read() -> None:
    assert error_of("train.steps=[1").startswith("train.steps=[1: the value is no valid YAML (")
    assert error_of("run.dir=${x").startswith("run.dir: ${x: no such reference; ")
    assert error_of("run.dir=${nowhere}").startswith("run.dir: ${nowhere}: no such reference; ${oc.env:NAME} is")


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
        (f"base: {NAME}\nresolved: true\n", ": resolved: it stands in the config.yaml of a run"),
        ("run:\n  dir: ${\n", ": "),
    ],
)
def test_a_mistake_in_a_file(text: str, message: str, tmp_path: Path) -> None:
    file = write(tmp_path / "mine.yaml", "model: {family: qwen3_omni}\n" + text)
    found = error_of("size=tiny", name=file)
    assert message in found
    if not message.startswith("recipe"):
        assert found.startswith(file)


def test_files_that_are_none(tmp_path: Path) -> None:
    file = write(tmp_path / "x.yaml", "- a\n")
    assert error_of(name=file) == f"{file}: wanted keys and values (`train:` and so on), found a list"
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    assert "no text in UTF-8" in error_of(name=str(tmp_path / "x.yaml"))
    write(tmp_path / "a.yaml", "base: b.yaml\n")
    write(tmp_path / "b.yaml", "base: a.yaml\n")
    assert "leads back to itself" in error_of(name=str(tmp_path / "a.yaml"))


def test_a_resolved_recipe_takes_no_overlay(tmp_path: Path) -> None:
    save_recipe(load_recipe(NAME), tmp_path / "config.yaml")
    message = error_of("size=tiny", name=str(tmp_path / "config.yaml"))
    assert message.startswith("size=tiny: ")
    assert "is a resolved recipe" in message


def test_a_key_about_a_recipe_file_in_a_file_of_a_size(tmp_path: Path) -> None:
    for key, why in (
        ("task: dpo", "it stands in a recipe file, or"),
        ("size: tiny", "it stands in a recipe file or on"),
    ):
        size = write(tmp_path / "mine.yaml", f"{key}\ntrain: {{lr: 1}}\n")
        name = key.replace(": ", "=")
        assert error_of(f"size={size}").startswith(f"{size}: {name}: {why}")
    assert load_recipe(NAME, [f"size={write(tmp_path / 'd.yaml', 'description: mine')}"])


def test_a_broken_config_of_the_weights(tmp_path: Path) -> None:
    write(tmp_path / "config.json", "{")
    assert "its JSON can't be read" in error_of(f"model.init={tmp_path}")
    write(tmp_path / "config.json", "[]")
    assert "wanted a JSON object" in error_of(f"model.init={tmp_path}")


def test_a_misspelt_key_of_the_architecture() -> None:
    near = "model.arch.thinker_config.text_config.hidden_size"
    others = {
        "thinker_config.text_config.hiden_size": "",
        "text_config.hidden_size": f", {near.replace('thinker', 'talker')}",
    }
    for key, other in others.items():
        assert error_of(f"model.arch.{key}=64") == f"model.arch.{key}: no such key; nearest: {near}{other}"


def test_a_key_that_the_architecture_leaves_to_its_default_may_be_set() -> None:
    arch = load_recipe(NAME, ["size=tiny", "model.arch.thinker_config.audio_config.dropout=0.1"]).model.arch
    assert arch["thinker_config"]["audio_config"]["dropout"] == 0.1


@pytest.mark.parametrize("rows", ["rows.jsonl", "data/rows.csv", "/data/shard-000.tar", "a.parquet"])
def test_a_file_of_rows_is_no_recipe(rows: str) -> None:
    for name in (rows, Path(rows)):
        with pytest.raises(ConfigError, match=f"recipe={rows}: a file of rows, and no recipe; .* data.train={rows}"):
            load_recipe(name)
    with pytest.raises(ConfigError, match=f"a file of rows is given as data.train={rows}"):
        load_recipe("qwen3_vl_sft", [rows])


def test_a_folder_or_a_list_in_the_place_of_a_recipe_says_what_it_may_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a folder; wanted a YAML file \(rows are named as data.train="):
        load_recipe(tmp_path)
    (tmp_path / "rows.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"found a list \(rows are named as data.train="):
        load_recipe(tmp_path / "rows.json")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"a folder; wanted a YAML file \(weights are named as model.init="):
        load_recipe(tmp_path)


# --- keys of an architecture stand in the part that has them; elsewhere nothing would read them

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
