"""Checks of the engine's keys, and of what they need of a machine: Transformer Engine, DeepEP, FlashQLA, precision and FP8."""

from __future__ import annotations

import importlib.util

from zoo.config.architecture import text_config
from zoo.config.checks.layout import all_sparse
from zoo.config.derived import sequence_parallel
from zoo.config.devices import gpu_capabilities, gpu_count
from zoo.config.gpus import find_gpu
from zoo.config.schema import Recipe
from zoo.errors import ConfigError
from zoo.packages import installed_version
from zoo.types import JsonMapping

TE_IN_FP32 = (
    "engine.backend=te with engine.precision=fp32: Transformer Engine rounds fp32 to TF32 (10 bits) in its products; use "
    "engine.backend=torch, or engine.precision=bf16"
)

TE_WIDTHS = (
    "engine.backend=te: Transformer Engine's products in half precision want widths of the decoder's linears that divide by 8 on each "
    "tensor parallel rank; use engine.backend=torch"
)

_TENSORWISE = (
    "engine.fp8_recipe=tensorwise with engine.backend={backend}: a scale for a tensor is Transformer Engine's; "
    "install it and set engine.backend=te, or set engine.fp8_recipe=blockwise"
)

FLASH_QLA_VERSION = "0.1.3"
_FLASH_QLA = "engine.delta_rule=flash_qla"
_FLASH_QLA_CAPABILITIES = ((9, 0), (10, 0), (10, 3))  # with kernels for both passes
_HOPPER = (9, 0)


def check_engine(recipe: Recipe) -> None:
    """The engine's keys against one another and against the model."""
    if recipe.train.main_grads_dtype == "bf16" and recipe.engine.precision != "bf16":
        raise ConfigError(
            f"train.main_grads_dtype=bf16 with engine.precision={recipe.engine.precision}: gradients of fp32 weights are kept in "
            f"fp32; leave train.main_grads_dtype out, or set engine.precision=bf16"
        )
    if recipe.engine.fp8:
        _check_fp8(recipe)
    if recipe.engine.cuda_graphs and (other := not_captured(recipe)):
        raise ConfigError(
            f"engine.cuda_graphs=true with {other}: layers are not captured under it; leave one of the two out"
        )
    if recipe.engine.delta_rule == "flash_qla":
        other = "engine.precision=fp32" if recipe.engine.precision == "fp32" else ""
        if other := other or ("run.deterministic=true" if recipe.run.deterministic else ""):
            raise ConfigError(
                f"{_FLASH_QLA} with {other}: that has the rule in plain PyTorch; leave one of the two out"
            )
    if recipe.engine.backend == "te" and recipe.engine.precision == "fp32":
        raise ConfigError(TE_IN_FP32)


def check_gpus(recipe: Recipe, *, on_this_machine: bool) -> None:
    """Whether the GPUs have what the engine's keys ask for: those of this machine, or else the kind that the recipe is planned for."""
    engine, kind = recipe.engine, find_gpu(recipe.machine.gpu or "")
    planned = {kind.capability} if kind is not None and kind.capability is not None else set()
    for major, minor in sorted(gpu_capabilities() if on_this_machine else planned):
        if engine.fp8 and engine.fp8_recipe == "blockwise" and (major, minor) != _HOPPER:
            raise ConfigError(
                f"engine.fp8_recipe=blockwise on a GPU of compute capability {major}.{minor}: cuBLAS multiplies FP8 with scales for "
                f"blocks on Hopper (9.0) alone; set engine.fp8_recipe=tensorwise, or leave engine.fp8 out"
            )
        if engine.delta_rule == "flash_qla" and (major, minor) not in _FLASH_QLA_CAPABILITIES:
            raise ConfigError(
                f"{_FLASH_QLA} on a GPU of compute capability {major}.{minor}: FlashQLA has no backward pass for it; leave "
                f"engine.delta_rule out"
            )


def check_packages(recipe: Recipe) -> None:
    """What the engine's keys want of the machine that trains: a GPU at all, and packages."""
    engine = recipe.engine
    if recipe.parallel.dispatch != "alltoall" and not _is_installed("deep_ep"):
        raise ConfigError(
            f"parallel.dispatch={recipe.parallel.dispatch}: its package deep_ep is not installed; install DeepEP "
            f"(for hybridep, its branch hybrid-ep), or use parallel.dispatch=alltoall"
        )
    if engine.fp8 and engine.fp8_recipe == "tensorwise" and not _is_installed("transformer_engine"):
        raise ConfigError(_TENSORWISE.format(backend=engine.backend))
    if engine.delta_rule == "flash_qla":
        if not gpu_count():
            raise ConfigError(f"{_FLASH_QLA}: its kernels need a GPU and none is here; leave engine.delta_rule out")
        if not _is_installed("fla") or installed_version("flash-qla") != FLASH_QLA_VERSION:
            raise ConfigError(
                f"{_FLASH_QLA}: flash-linear-attention and flash-qla {FLASH_QLA_VERSION} have to be installed; "
                f"pip install 'zoo-train[kernels,qla]', or leave engine.delta_rule out"
            )
    if engine.backend == "te":
        if not gpu_count():
            raise ConfigError(
                "engine.backend=te: Transformer Engine needs a GPU and none is here; use engine.backend=torch"
            )
        if not _is_installed("transformer_engine"):
            raise ConfigError(
                "engine.backend=te: Transformer Engine is not installed; "
                "pip install --no-build-isolation 'zoo-train[te]', or use engine.backend=torch"
            )


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def not_captured(recipe: Recipe) -> str | None:
    """The key under which layers are not captured as CUDA graphs, with its value; None where they can be."""
    engine, parallel = recipe.engine, recipe.parallel
    others = {
        "engine.precision=fp32": engine.precision == "fp32",
        "engine.fp8=true": engine.fp8,
        "engine.backend=te": uses_transformer_engine(recipe),
        f"engine.recompute={engine.recompute}": engine.recompute != "none",
        f"engine.delta_rule={engine.delta_rule}": engine.delta_rule != "auto",
        "run.deterministic=true": recipe.run.deterministic,
        "parallel.sp=true": sequence_parallel(recipe),
        f"parallel.cp={parallel.cp}": parallel.cp > 1,
        f"parallel.pp={parallel.pp}": parallel.pp > 1,
        "packing.mode=none": recipe.packing.mode == "none",
        # Gradients leave the GPU in each step, and graphs write to where they were.
        "rl.vllm.sleep=true": recipe.rl.rollout == "vllm" and recipe.rl.vllm.sleep,
    }
    return next((name for name, there in others.items() if there), None)


def uses_transformer_engine(recipe: Recipe) -> bool:
    """Whether the backend of a recipe, validated or not, is Transformer Engine's, as `zoo.nn.backend.get_backend` chooses it."""
    engine = recipe.engine
    by_tensor = engine.fp8 and engine.fp8_recipe == "tensorwise"
    return engine.backend == "te" or (engine.backend == "auto" and by_tensor)


def _check_fp8(recipe: Recipe) -> None:
    engine = recipe.engine
    if engine.precision != "bf16":
        raise ConfigError(
            f"engine.fp8=true with engine.precision={engine.precision}: what is not in FP8 is in bf16; "
            f"set engine.precision=bf16"
        )
    if engine.fp8_recipe == "tensorwise" and engine.backend == "torch":
        raise ConfigError(_TENSORWISE.format(backend=engine.backend))
    if engine.fp8_recipe == "blockwise" and engine.backend == "te":
        raise ConfigError(
            "engine.fp8_recipe=blockwise with engine.backend=te: scales for blocks are of the torch backend; set engine.backend=torch, "
            "or engine.fp8_recipe=tensorwise"
        )
    # FP8 products want 16 inputs and outputs at a time, on every rank; experts are in bf16
    for key, (width, ranks) in _fp8_widths(recipe, text_config(recipe.model.arch)).items():
        if width and width % (16 * ranks):
            raise ConfigError(
                f"engine.fp8=true with parallel.tp={recipe.parallel.tp}: the model's {key} is {width}, and FP8 wants a multiple of "
                f"{16 * ranks}; leave engine.fp8 out"
            )


def _fp8_widths(recipe: Recipe, text: JsonMapping) -> dict[str, tuple[int, int]]:
    """(width, ranks that it is cut over) of what the decoder's linears take and give; 0 where the config leaves it open."""

    def width_of(key: str) -> int:
        return int(text.get(key) or 0)

    tp, heads = recipe.parallel.tp, width_of("num_attention_heads")
    groups = width_of("num_key_value_heads") or heads
    head = width_of("head_dim") or (width_of("hidden_size") // heads if heads else 0)
    widths = {"hidden_size": (width_of("hidden_size"), 1)}
    if not all_sparse(recipe, text):
        widths["intermediate_size"] = (width_of("intermediate_size"), tp)
    widths["shared_expert_intermediate_size"] = (width_of("shared_expert_intermediate_size"), tp)
    widths["num_attention_heads * head_dim"] = (heads * head, tp)
    widths["(num_attention_heads + 2 * num_key_value_heads) * head_dim"] = ((heads + 2 * groups) * head, tp)
    global_width, full = width_of("global_head_dim"), width_of("num_global_key_value_heads")
    widths["num_attention_heads * global_head_dim"] = (heads * global_width, tp)
    widths["(num_attention_heads + num_global_key_value_heads) * global_head_dim"] = ((heads + full) * global_width, tp)
    if "linear_attention" in (text.get("layer_types") or ()) and recipe.engine.fp8_recipe == "tensorwise":
        keys = width_of("linear_num_key_heads") * width_of("linear_key_head_dim")
        values = width_of("linear_num_value_heads") * width_of("linear_value_head_dim")
        widths["linear_num_value_heads * linear_value_head_dim"] = (values, tp)
        widths["linear attention's projection"] = (2 * (keys + values + width_of("linear_num_value_heads")), tp)
    return widths
