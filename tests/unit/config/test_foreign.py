"""Names of other trainers: each leads to keys that there are."""

import pytest

from zoo.cli.main import main
from zoo.config.compose import load_recipe
from zoo.config.layers.foreign import _TABLE, NAMES, foreign_hint
from zoo.config.layers.keys import keys
from zoo.config.schema import Recipe
from zoo.errors import ConfigError

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


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--learning_rate", "1e-4"], ["--learning_rate=1e-4"], ["learning_rate=1e-4"]):
        assert main(["show", "recipe=llava_sft", *arguments]) == 2
        assert capsys.readouterr().err == "zoo: error: learning_rate: no such key; zoo's is train.lr\n"
    assert main(["show", "recipe=llava_sft", "--bf16"]) == 2
    assert (
        capsys.readouterr().err
        == "zoo: error: bf16: no such key; zoo's is engine.precision (fp32 or bf16; by itself bf16 on a GPU)\n"
    )
