"""Files and command lines of other trainers: recognised, and answered with a command that resolves here and says the same."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from zoo.cli.main import main
from zoo.config import compose
from zoo.config.compose import load_recipe
from zoo.config.foreign.reader import flattened, program_of
from zoo.config.foreign.translation import translate
from zoo.config.layers.foreign import _TABLE, NAMES, foreign_hint
from zoo.config.layers.keys import keys
from zoo.config.layers.reader import read_yaml
from zoo.config.schema import Recipe
from zoo.errors import ConfigError

LLAMA_FACTORY = r"""
{model_name_or_path: Qwen/Qwen3-VL-4B-Instruct, trust_remote_code: true, stage: sft, do_train: true, finetuning_type: lora,
    lora_rank: 8, lora_target: all, dataset: mine, template: qwen3_vl, cutoff_len: 2048, output_dir: saves/x, per_device_train_batch_size: 2,
    gradient_accumulation_steps: 8, learning_rate: 0.0001, num_train_epochs: 3.0, lr_scheduler_type: cosine, warmup_ratio: 0.1,
    bf16: true, ddp_timeout: 180000000}
"""
FULL = r"""
{model_name_or_path: Qwen/Qwen3-VL-30B-A3B-Instruct, stage: sft, finetuning_type: full, freeze_multi_modal_projector: false,
    deepspeed: examples/deepspeed/ds_z3_config.json, dataset: rows.jsonl, cutoff_len: 4096, max_steps: 200, warmup_ratio: 0.1,
    lr_scheduler_type: constant_with_warmup}
"""
SWIFT = r"""
{model: Qwen/Qwen3-8B, rlhf_type: dpo, train_type: full, dataset: [rows.jsonl], torch_dtype: float32, beta: 0.2, max_length: 1024,
    tensor_model_parallel_size: 2, split_dataset_ratio: 0.02, report_to: wandb}
"""
AXOLOTL = r"""
{base_model: google/gemma-3-4b-it, load_in_4bit: true, datasets: [{path: org/set, type: alpaca, split: train}, {path: more.jsonl,
    type: chat_template}], val_set_size: 0.1, sequence_len: 4096, sample_packing: true, adapter: qlora, lora_r: 32,
    lora_alpha: 16, peft_use_rslora: true, peft_use_dora: true, loraplus_lr_ratio: 8, lora_target_modules: [q_proj, v_proj], micro_batch_size: 2, optimizer: adamw_bnb_8bit, weight_decay: 0.0,
    wandb_project: tuning, saves_per_epoch: 2, unheard_of: 3}
"""
TORCHTUNE = r"""
{output_dir: /tmp/out, model: {_component_: torchtune.models.qwen3.lora_qwen3_8b_instruct, lora_rank: 16}, checkpointer: {
    checkpoint_dir: '${output_dir}/Qwen3-8B'}, batch_size: 4, epochs: 2, optimizer: {_component_: torch.optim.AdamW, lr: 2.0e-05}}
"""
VERL = r"""
{data: {train_files: rows.parquet, max_length: 1024}, model: {partial_pretrain: Qwen/Qwen3-0.6B}, optim: {lr: 1.0e-05},
    trainer: {total_epochs: 2, n_gpus_per_node: 8}}
"""
VISION = r"""
{base_model: Qwen/Qwen2.5-VL-7B-Instruct, processor_type: AutoProcessor, chat_template: qwen2_vl, datasets: [{path: org/chats,
    type: chat_template.default, split: 'train[:1%]', field_messages: talk, shards: 4}], adapter: lora, lora_r: 32,
    lora_target_modules: 'model.language_model.layers.[\d]+.self_attn.(q|k)_proj', sequence_len: 8192, max_steps: 40, learning_rate: 0.0002,
    cosine_min_lr_ratio: 0.1, lr_scheduler: cosine, train_on_inputs: true}
"""
PREFERENCES = r"""
{model_name_or_path: Qwen/Qwen2.5-VL-7B-Instruct, stage: dpo, do_train: true, finetuning_type: lora, lora_target: all,
    pref_beta: 0.1, pref_loss: simpo, dataset: pairs.json, template: qwen2_vl, max_samples: 1000, learning_rate: 5.0e-06,
    lr_scheduler_type: cosine, lr_scheduler_kwargs: {min_lr_rate: 0.1}}
"""
PARTS = r"""
{model: Qwen/Qwen2.5-Omni-7B, dataset: ['org/coco:validation#200', my.jsonl], freeze_vit: false, vit_lr: 1.0e-05, learning_rate: 0.0001,
    loss_scale: last_round, truncation_strategy: delete, torch_dtype: bfloat16}
"""
MEGATRON_SWIFT = r"""
{model: Qwen/Qwen3-30B-A3B-Instruct-2507, tuner_type: full, dataset: a.jsonl, tensor_model_parallel_size: 2, expert_model_parallel_size: 8,
    recompute_granularity: full, micro_batch_size: 1, global_batch_size: 16, lr: 1.0e-05, min_lr: 1.0e-06, lr_decay_style: cosine,
    train_iters: 100, lr_warmup_fraction: 0.05, moe_grouped_gemm: true, num_layers: 48}
"""
TRL = r"""
{model_name_or_path: google/gemma-3-4b-it, dataset_name: trl-lib/Capybara, dataset_train_split: train_sft, use_peft: true,
    dtype: bfloat16, assistant_only_loss: true, push_to_hub: true, max_length: 2048}
"""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compose, "gpu_count", lambda: 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    listed = {"mine": {"file_name": "mine.json", "formatting": "sharegpt"}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(listed))


def answer(text: str) -> tuple[str, list[str], Recipe]:
    """The message about a file, the overrides that it names, and what they resolve to."""
    Path("my.yaml").write_text(text)
    with pytest.raises(ConfigError) as refusal:
        load_recipe("my.yaml")
    message = str(refusal.value)
    (command,) = [line for line in message.split("\n") if line.startswith("  zoo train ")]
    _, _, name, *overrides = shlex.split(command)
    bare = [text for text in overrides if not text.startswith("model.init=")]  # the hub is not asked
    return message, overrides, load_recipe(name.removeprefix("recipe="), bare)


def value(recipe: Recipe, key: str) -> Any:
    section, _, name = key.rpartition(".")
    return getattr(getattr(recipe, section) if section else recipe, name)


@pytest.mark.parametrize(
    ("text", "program", "name", "init", "wanted"),
    [
        (LLAMA_FACTORY, "LLaMA-Factory", "qwen3_vl_lora", "Qwen/Qwen3-VL-4B-Instruct", {
            "lora.rank": 8, "lora.alpha": 16, "packing.budget": 2048, "train.global_batch": 16, "train.lr": 1e-4, "train.epochs": 3, "train.min_lr": 0,
            "run.dir": "saves/x", "data.train": [{"path": "data/mine.json", "format": "conversations"}],
        }),
        (FULL, "LLaMA-Factory", "qwen3_vl_moe_sft", "Qwen/Qwen3-VL-30B-A3B-Instruct", {
            "model.freeze": ["vision"], "train.lr_scale": {"merger": 1.0}, "train.steps": 200, "train.warmup_steps": 20, "train.schedule": "constant",
            "data.train": ["rows.jsonl"], "lora.rank": 0,
        }),
        (SWIFT, "ms-swift", "qwen3_dpo", "Qwen/Qwen3-8B", {
            "train.loss": "dpo", "train.beta": 0.2, "packing.budget": 1024, "engine.precision": "fp32", "parallel.tp": 2, "log.wandb": "zoo",
            "data.train": [{"path": "rows.jsonl", "held_out": 0.02}], "model.freeze": [],
        }),
        (AXOLOTL, "axolotl", "gemma3_lora", "google/gemma-3-4b-it", {
            "lora.rank": 32, "lora.alpha": 16, "lora.rslora": True, "lora.dora": True, "lora.b_lr_scale": 8, "lora.targets": ["q_proj", "v_proj"], "train.global_batch": 2, "train.exp_avg_dtype": "fp8", "train.weight_decay": 0,
            "log.wandb": "tuning",
            "data.train": [{"hub": "org/set", "split": "train", "format": "alpaca", "held_out": 0.1}, {"path": "more.jsonl", "held_out": 0.1}],
        }),
        (TORCHTUNE, "torchtune", "qwen3_lora", "/tmp/out/Qwen3-8B", {"lora.rank": 16, "train.global_batch": 4, "train.epochs": 2, "train.lr": 2e-5}),
        (VERL, "verl", "qwen3_sft", "Qwen/Qwen3-0.6B", {"data.train": ["rows.parquet"], "packing.budget": 1024, "train.lr": 1e-5, "train.epochs": 2, "nproc": 8}),
        (VISION, "axolotl", "qwen25_vl_lora", "Qwen/Qwen2.5-VL-7B-Instruct", {
            "lora.rank": 32, "lora.targets": [r"model.language_model.layers.[\d]+.self_attn.(q|k)_proj"], "train.min_lr": 2e-5, "data.labels": "all",
            "data.train": [{"hub": "org/chats", "split": "train", "columns": {"messages": "talk"}}],
        }),
        (PREFERENCES, "LLaMA-Factory", "qwen25_vl_dpo_lora", "Qwen/Qwen2.5-VL-7B-Instruct", {
            "train.loss": "simpo", "train.beta": 0.1, "lora.rank": 8, "lora.alpha": 16, "train.min_lr": 5e-7, "data.train": ["pairs.json"],
        }),
        (PARTS, "ms-swift", "qwen25_omni_lora", "Qwen/Qwen2.5-Omni-7B", {
            "lora.rank": 8, "lora.alpha": 32, "lora.parts": ["vision", "audio", "language"], "train.lr_scale": {"vision": 0.1, "audio": 0.1}, "data.labels": "last",
            "data.overlong": "drop", "data.train": [{"hub": "org/coco", "name": "validation"}, "my.jsonl"],
        }),
        (MEGATRON_SWIFT, "ms-swift", "qwen3_moe_sft", "Qwen/Qwen3-30B-A3B-Instruct-2507", {
            "parallel.tp": 2, "parallel.ep": 8, "train.global_batch": 16, "train.steps": 100, "train.warmup_steps": 5, "train.lr": 1e-5, "train.min_lr": 1e-6,
            "engine.recompute": "full", "lora.rank": 0,
        }),
        (TRL, "TRL", "gemma3_lora", "google/gemma-3-4b-it", {
            "data.train": [{"hub": "trl-lib/Capybara", "split": "train_sft"}], "lora.rank": 16, "lora.alpha": 32, "packing.budget": 2048,
        }),
    ],
    ids=[
        "llama-factory", "llama-factory-full", "ms-swift", "axolotl", "torchtune", "verl",
        "axolotl-vision", "llama-factory-simpo", "ms-swift-parts", "megatron-swift", "trl",
    ],
)  # fmt: skip
def test_a_file_of_another_trainer_is_answered_with_a_command(
    text: str, program: str, name: str, init: str, wanted: dict[str, Any]
) -> None:
    message, overrides, recipe = answer(text)
    assert f"a file of {program}" in message
    assert recipe.recipe == name and f"model.init={init}" in overrides
    assert {key: value(recipe, key) for key in wanted} == wanted


@pytest.mark.parametrize(
    ("text", "usual"),
    [
        (LLAMA_FACTORY, {"stage", "finetuning_type", "lora_rank"}), (FULL, {"stage"}), (SWIFT, {"train_type"}), (AXOLOTL, {"load_in_4bit", "adapter"}), (TORCHTUNE, {"_component_"}),
        (VERL, set()), (VISION, {"adapter"}), (PREFERENCES, {"finetuning_type"}), (PARTS, set()), (MEGATRON_SWIFT, {"tuner_type"}), (TRL, set()),
    ],
)  # fmt: skip
def test_no_key_of_a_foreign_file_is_silent(text: str, usual: set[str]) -> None:
    """Without it the answer is another one; but for keys that say what the program, or the other keys, mean anyway."""
    tree = read_yaml(text)
    settings, program = dict(flattened(tree)), program_of(tree) or ""

    def told(left_out: str) -> str:
        left = {key: value for key, value in settings.items() if key != left_out}
        return str(translate(left, lambda name, overrides: None, program))

    silent = {key for key in settings if told(key) == told("")}
    assert {key.rpartition(".")[2] for key in silent} <= usual


def test_files_that_train_nothing_name_the_verb() -> None:
    files = {
        "zoo generate out/lora": "model_name_or_path: Qwen/Qwen3-8B\nadapter_name_or_path: out/lora\ntemplate: qwen3\ninfer_backend: vllm\n",
        "zoo convert out/lora merged": "model_name_or_path: Qwen/Qwen3-8B\nadapter_name_or_path: out/lora\ntemplate: qwen3\nexport_dir: merged\n",
    }
    for command, text in files.items():
        Path("my.yaml").write_text(text)
        with pytest.raises(ConfigError, match=command):
            load_recipe("my.yaml")


def test_what_zoo_does_not_do_is_said() -> None:
    message, _, _ = answer("model: Qwen/Qwen3-8B\nrlhf_type: grpo\ntuner_type: full\ndataset: a.jsonl\n")
    assert "grpo: no recipe does this" in message and "docs/verl.md" in message
    Path("my.yaml").write_text("base_model: org/unheard-of\nadapter: lora\nlora_r: 8\ndatasets: [{path: a.jsonl}]\n")
    with pytest.raises(ConfigError, match=r"recipe=RECIPE(?s:.*)org/unheard-of: no family of zoo is called so"):
        load_recipe("my.yaml")


def test_every_key_of_a_foreign_file_is_told() -> None:
    message, _, _ = answer(AXOLOTL)
    assert "without a counterpart here: unheard_of" in message
    assert "saves_per_epoch: 2: zoo's is train.save_every" in message and "quantised weights" in message
    message, _, _ = answer(LLAMA_FACTORY)
    assert "train.warmup_steps: a number of steps: 0.1" in message and "trust_remote_code" in message


def test_a_recipe_with_wrong_keys_is_a_recipe_and_told_of_all_of_them() -> None:
    Path("my.yaml").write_text(
        "base: llava_sft\nlearning_rate: 1e-4\ntrain: {num_train_epochs: 3, lr: 1e-4}\nzzz: {a: 1, b: 2}\n"
    )
    with pytest.raises(ConfigError) as refusal:
        load_recipe("my.yaml", ["output_dir=x", "train.stepz=3"])
    said = str(refusal.value)
    for told in (
        "learning_rate: no such key; zoo's is train.lr",
        "train.num_train_epochs",
        "zzz.a",
        "zzz.b",
        "run.dir",
        "nearest: train.steps",
    ):
        assert told in said  # fmt: skip
    Path("own.yaml").write_text("train:\n  steps: 5\n  learning_rate: 1\n")
    with pytest.raises(ConfigError, match=r"own.yaml: train.learning_rate: no such key; zoo's is train.lr"):
        load_recipe("own.yaml")


def test_several_wrong_values_and_keys_without_effect_come_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)train.lr=x: wanted.*train.schedule=cosin: wanted"):
        load_recipe("llava_sft", ["train.lr=x", "train.schedule=cosin"])
    with pytest.raises(ConfigError, match=r"(?s)lora.alpha=3.*lora.dropout=0.1"):
        load_recipe("llava_sft", ["lora.alpha=3", "lora.dropout=0.1"])


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("train recipe=llava_sft --use_flash_attn --bf16 --num_train_epochs 3", ["on by themselves", "engine.precision", "recipe=llava_sft train.epochs=3"]),
        ("train recipe=llava_sft --template llava --output_dir x", ["data.template", "run.dir=x"]),
        ("train --model_name_or_path Qwen/Qwen3-VL-4B-Instruct --dataset my.jsonl --use_peft", ["recipe=qwen3_vl_lora", "data.train=my.jsonl"]),
        ("train --config my.yaml", ["zoo train my.yaml"]),
        ("train --model Qwen/Qwen3-VL-8B-Instruct --train_type lora --dataset a.jsonl 'org/b#500' --target_modules q_proj v_proj",
         ["command line of ms-swift", "recipe=qwen3_vl_lora", "data.train=[a.jsonl, {hub: org/b}]", "lora.targets=[q_proj, v_proj]", "org/b#500"]),
        ("sft --model Qwen/Qwen3-8B --dataset a.jsonl --tuner_type full", ["recipe=qwen3_sft", "data.train=a.jsonl"]),
        ("train recipe=qwen3_sft --tensor-model-parallel-size 2 --recompute-activations --train-iters 5 --unheard-of",
         ["tensor-model-parallel-size: no such key; zoo's is parallel.tp", "parallel.tp=2", "train.steps=5", "engine.recompute=full", "unheard-of"]),
        ("train --tensor-model-parallel-size 2 --swiglu --num-layers 32", ["command line of Megatron-LM", "parallel.tp=2"]),
        ("train actor_rollout_ref.model.path=Qwen/Qwen3-8B algorithm.adv_estimator=grpo data.train_files=a.parquet", ["verl", "docs/verl.md", "data.train=a.parquet"]),
        ("train recipe=llava_sft data=my.jsonl", ["data.train"]),
        ("train recipe=llava_sft data.train = my.jsonl", ["data.train=my.jsonl"]),
        ("train recipe=llava_sft data.train= my.jsonl", ["data.train=my.jsonl"]),
        ("train recipe=llava_sft train.lr 1e-4", ["train.lr=1e-4"]),
        ("train recipe=llava_sft data.train={path: my.jsonl, held_out: 0.1}", ["'data.train={path: my.jsonl, held_out: 0.1}'"]),
        ("train recipe=llava_sft 'train.lr=1e-4 train.steps=5'", ["quote each by itself"]),
        ("train recipe=llava_sft data.format=sharegpt", ["format: of an entry"]),
        ("train recipe=llava_sft 'data.train={file: a.jsonl, heldout: 0.1}'", ["zoo's is path", "zoo's is held_out"]),
        ("train recipe=llava_sft 'data.train={path: a.jsonl, format: sharegpt}'", ["zoo's is conversations"]),
        ("train recipe=llava_sft actor_rollout_ref.model.path=x trainer.max_steps=3", ["model.init", "train.steps=3"]),
        ("sft recipe=llava_sft", ["nearest: zoo train"]),
        ("generate runs/demo What? picture=photo.png", ["image=photo.png"]),
    ],
)  # fmt: skip
def test_what_newcomers_type(line: str, told: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(line)) == 2
    said = capsys.readouterr().err
    assert all(text in said for text in told), said


def test_a_tab_is_named() -> None:
    Path("my.yaml").write_text("base: llava_sft\ntrain:\n\tsteps: 5\n")
    with pytest.raises(ConfigError, match=r"my.yaml:3: .*begins with a tab: indent by spaces"):
        load_recipe("my.yaml")


@pytest.mark.parametrize(
    ("overrides", "settings", "gone"),
    [
        (["learning_rate=2e-5", "--num-train-epochs=1"], {"train.lr": 2e-5, "train.epochs": 1}, ["1.0e-4", "0.0001"]),
        (["train.lr=2e-5", "train.steps=7"], {"train.lr": 2e-5, "train.steps": 7}, ["train.epochs"]),
        (["data.train=[{path: a.jsonl, weight: 1}]"], {"data.train": [{"path": "a.jsonl", "weight": 1}]}, ["mine"]),
        (["model.init=Qwen/Qwen3-8B"], {"model.init": "Qwen/Qwen3-8B"}, ["qwen3_vl", "Qwen3-VL"]),
        (["lora_rank=64", "run.dir=/tmp/x"], {"lora.rank": 64, "lora.alpha": 128, "run.dir": "/tmp/x"}, ["saves/x"]),
    ],
)
def test_overrides_behind_a_foreign_file_replace_what_it_says(
    overrides: list[str], settings: dict[str, Any], gone: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "their.yaml"
    file.write_text(LLAMA_FACTORY, encoding="utf-8")
    with pytest.raises(ConfigError, match="a file of LLaMA-Factory, and no recipe") as caught:
        load_recipe(file, overrides)
    answer = str(caught.value).partition("\n")[2]
    command = dict(text.partition("=")[::2] for text in shlex.split(answer.splitlines()[0])[2:])
    assert {key: read_yaml(command[key]) for key in settings} == settings
    assert not any(text in answer for text in gone), answer


# --- each of their names leads to keys that there are

COMMON = [name for line in """
batch_size learning_rate num_train_epochs output_dir gradient_accumulation_steps per_device_train_batch_size max_seq_length
cutoff_len warmup_ratio lr_scheduler_type save_steps logging_steps eval_steps bf16 lora_rank lora_alpha lora_target
model_name_or_path dataset val_size report_to deepspeed finetuning_type tensor_model_parallel_size max_grad_norm
gradient_checkpointing save_total_limit max_steps context_parallel_size expert_model_parallel_size attn_implementation
""".splitlines() for name in line.split()]  # fmt: skip


def test_every_target_is_a_key_and_every_name_means_one_thing() -> None:
    names = [name for _, _, some in _TABLE for name in some.split()]
    assert len(names) == len(set(names)) > 200
    for name, meaning in NAMES.items():
        assert all(key in keys(Recipe) for key in meaning.keys), name
        assert meaning.keys or meaning.note
        assert name not in keys(Recipe) and name == name.lower()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", COMMON)
def test_common_names(name: str) -> None:
    for key in (name, f"train.{name}", f"training.{name}", name.upper(), name.replace("_", "-")):
        with pytest.raises(ConfigError) as caught:
            load_recipe("llava_sft", [f"{key}=1"])
        meaning = str(NAMES[name])
        assert str(caught.value) == f"{key}: no such key; {meaning}"


def test_arithmetic_and_where_there_is_nothing() -> None:
    assert foreign_hint("gradient_accumulation_steps") == (
        "zoo's is train.global_batch (gradient accumulation = train.global_batch / (train.micro_batch * data-parallel ranks))"
    )
    assert foreign_hint("warmup_ratio") == "zoo's is train.warmup_steps (a number of steps: ratio * train.steps)"
    assert foreign_hint("train.bf16") == "zoo's is engine.precision (fp32 or bf16; by itself bf16 on a GPU)"
    assert foreign_hint("load_in_4bit") == "quantised weights are not trained here"
    assert foreign_hint("zzz") is None


def test_packing_is_a_section() -> None:
    with pytest.raises(ConfigError, match=r"^packing=true: packing is a section; zoo's is packing.mode"):
        load_recipe("llava_sft", ["packing=true"])
    with pytest.raises(ConfigError, match=r"^weight_decay: no such key; nearest: train.weight_decay"):
        load_recipe("llava_sft", ["weight_decay=1"])


def test_options_of_others(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--learning_rate", "1e-4"], ["--learning_rate=1e-4"], ["learning_rate=1e-4"]):
        assert main(["show", "recipe=llava_sft", *arguments]) == 2
        assert capsys.readouterr().err == "zoo: error: learning_rate: no such key; zoo's is train.lr\n"
    assert main(["show", "recipe=llava_sft", "--bf16"]) == 2
    said = "bf16: no such key; zoo's is engine.precision (fp32 or bf16; by itself bf16 on a GPU)"
    assert capsys.readouterr().err == f"zoo: error: {said}\n"
