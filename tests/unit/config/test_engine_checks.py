"""Refusals of the engine's keys: kernels, precision, FP8, and what a machine has to have for them."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from support.refusals import MOE, error_of, gpus

from zoo.config.checks import engine
from zoo.config.compose import load_recipe
from zoo.config.schema import Recipe
from zoo.config.validate import validate
from zoo.errors import ConfigError


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 0)


def test_transformer_engine_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = error_of(MOE, {"engine.backend": "te"})
    assert message.startswith("engine.backend=te: Transformer Engine is not installed; pip install")
    assert "zoo-train[te]" in message


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("engine.recompute=selective", "engine.recompute=selective"),
        ("packing.mode=none", "packing.mode=none"),
        ("engine.precision=fp32", "engine.precision=fp32"),
        ("run.deterministic=true", "run.deterministic=true"),
    ],
)
def test_layers_are_captured_alone_where_shapes_and_kernels_allow(key: str, said: str) -> None:
    keys = ["hardware=cpu", "engine.precision=bf16", "engine.cuda_graphs=true"]
    validate(load_recipe("qwen3_vl_sft", keys), 1)
    with pytest.raises(ConfigError, match=f"engine.cuda_graphs=true with {said}"):
        validate(load_recipe("qwen3_vl_sft", [*keys, key]), 1)


def test_fp8_by_blocks_is_of_the_torch_backend_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    fp8 = {"engine.fp8": True, "engine.precision": "bf16"}
    assert "what is not in FP8 is in bf16" in error_of(MOE, {"engine.fp8": True})
    assert validate(MOE.replace(fp8), 1).packing.align == 1
    with pytest.raises(ConfigError, match="scales for blocks are of the torch backend"):
        engine.check_engine(MOE.replace({**fp8, "engine.backend": "te"}))
    for capability, right in ((9, 0), True), ((8, 9), False), ((10, 0), False):
        monkeypatch.setattr(engine, "gpu_capabilities", lambda found=capability: frozenset({found}))
        if right:
            validate(MOE.replace(fp8), 1)
        else:
            assert "on Hopper (9.0) alone" in error_of(MOE, fp8)


def test_fp8_by_tensors_needs_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    fp8 = {"engine.fp8": True, "engine.fp8_recipe": "tensorwise", "engine.precision": "bf16"}
    assert "is Transformer Engine's" in error_of(MOE, fp8)
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda name: object())
    assert "is Transformer Engine's" in error_of(MOE, {**fp8, "engine.backend": "torch"})
    assert validate(MOE.replace(fp8), 1).packing.align == 16
    assert validate(MOE.replace({**fp8, "parallel.cp": 2}), 2).packing.align == 32
    assert "wanted a multiple of 16" in error_of(MOE, {**fp8, "packing.align": 8})


def test_fp8_asks_for_widths_before_anything_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda name: object())
    sizes = {
        "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16,
    }  # fmt: skip
    linear = {
        "layer_types": ["linear_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 8,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    }  # fmt: skip

    def asked(text: dict[str, Any], **keys: Any) -> Recipe:
        arch = {"text_config": text}
        return Recipe().replace({"model.arch": arch, "engine.fp8": True, "engine.precision": "bf16", **keys})

    engine.check_engine(asked(sizes))
    engine.check_engine(asked({**sizes, **linear}))
    engine.check_engine(asked({**sizes, **linear, "linear_num_value_heads": 3}))  # in bf16 under blockwise
    engine.check_engine(asked({**sizes, "num_experts": 4, "intermediate_size": 14}))  # nobody's
    for text, keys, message in (
        ({**sizes, "hidden_size": 72}, {}, "hidden_size is 72.*multiple of 16"),
        ({**sizes, "intermediate_size": 104}, {}, "intermediate_size is 104"),
        (sizes, {"parallel.tp": 4}, "intermediate_size is 96.*multiple of 64"),
        ({**sizes, "head_dim": 10}, {}, "head_dim is 40"),
        (
            {**sizes, "num_experts": 4, "shared_expert_intermediate_size": 14},
            {},
            "shared_expert_intermediate_size is 14",
        ),
        (
            {**sizes, **linear, "linear_num_value_heads": 3},
            {"engine.fp8_recipe": "tensorwise"},
            "linear attention's projection is",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            engine.check_engine(asked(text, **keys))


def test_transformer_engine_is_refused_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda name: object())
    gpus(monkeypatch, 1)
    asked = Recipe().replace({"engine.backend": "te", "engine.precision": "fp32"})
    with pytest.raises(ConfigError, match="TF32"):
        engine.check_engine(asked)
    engine.check_engine(asked.replace({"engine.precision": "bf16"}))
    engine.check_engine(asked.replace({"engine.backend": "auto"}))


def test_flash_qla_is_refused_where_it_would_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Recipe().replace({"engine.delta_rule": "flash_qla", "engine.precision": "bf16"})
    for key, value in (("engine.precision", "fp32"), ("run.deterministic", True)):
        with pytest.raises(ConfigError, match=f"flash_qla with {key}=.*in plain PyTorch"):
            engine.check_engine(asked.replace({key: value}))
    with pytest.raises(ConfigError, match=r"cuda_graphs=true with engine\.delta_rule=flash_qla"):
        engine.check_engine(asked.replace({"engine.cuda_graphs": True}))
    engine.check_engine(asked)
    gpus(monkeypatch, 0)
    with pytest.raises(ConfigError, match="need a GPU and none is here"):
        engine.check_packages(asked)
    gpus(monkeypatch, 1)
    monkeypatch.setattr(engine, "_is_installed", lambda name: name == "fla")
    monkeypatch.setattr(engine, "installed_version", lambda name: "0.1.2")
    wanted = r"flash-qla 0\.1\.3 have to be installed; pip install 'zoo-train\[kernels,qla\]'"
    with pytest.raises(ConfigError, match=wanted):
        engine.check_packages(asked)
    monkeypatch.setattr(engine, "installed_version", lambda name: "0.1.3")
    engine.check_packages(asked)
    extras = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert f"flash-qla=={engine.FLASH_QLA_VERSION}" in extras["qla"]


def test_a_plan_asks_the_gpu_that_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither packages nor GPUs of the machine that plans, but what is known of the kind of GPU."""
    gpus(monkeypatch, 0)
    asked = {"engine.precision": "bf16", "engine.delta_rule": "flash_qla", "log.wandb": "here"}
    for gpu, changes, told in (
        ("h200", {"engine.fp8": True}, None),
        ("b200", {}, None),
        ("80gb", {"engine.fp8": True}, None),  # of any kind
        ("b200", {"engine.fp8": True}, r"blockwise on a GPU of compute capability 10\.0"),
        ("a100", {}, r"compute capability 8\.0: FlashQLA has no backward pass for it"),
    ):
        recipe = MOE.replace({**asked, "machine.gpu": gpu, **changes})
        if told is None:
            validate(recipe, 1, on_this_machine=False)
        else:
            with pytest.raises(ConfigError, match=told):
                validate(recipe, 1, on_this_machine=False)
    with pytest.raises(ConfigError, match="none is here"):
        validate(recipe, 1)
