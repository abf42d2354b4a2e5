"""Runs on the GPU through the command line: a plan, training with adapters, resuming; what is kept in fp32; the start-up check."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import packed_batch, single_process_world
from support.on_gpu import ON_GPU, TE
from support.rows import vision_examples

REPO = Path(__file__).parents[2]
SHORT = (
    "train.global_batch=2", "train.warmup_steps=0", "train.eval_rows=2", "data.lookahead=8", "packing.budget=512", "nproc=1",
    "log.tensorboard=false", "log.predictions=0",
)  # fmt: skip


def zoo(*arguments: str, cache: Path) -> str:
    """The output of a command that must end well."""
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "zoo", *arguments], cwd=REPO, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_a_plan(cache: Path) -> None:
    found = json.loads(zoo("plan", "recipe=qwen35_vl_sft", "size=2b", "hardware=1xh200", "--json", cache=cache))
    assert found


def test_the_driver_says_what_torch_says() -> None:
    """On the number, memory and architecture of the GPUs."""
    names = "from zoo.config.devices import gpu_capabilities, gpu_count, gpu_memory"
    by_torch = "{torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}"
    answers = {
        subprocess.run([sys.executable, "-c", code], cwd=REPO, stdout=subprocess.PIPE, text=True, check=True).stdout
        for code in (
            f"{names}; print(gpu_count(), gpu_memory(), sorted(gpu_capabilities()))",
            f"import torch; {names}; print(gpu_count(), gpu_memory(), sorted({by_torch}))",
        )
    }
    assert len(answers) == 1 and ("(" in answers.pop()) == ON_GPU


def test_adapters_then_a_resumed_run(cache: Path, tmp_path: Path, reports: list[str]) -> None:
    """The kernels are checked at the first start on a GPU, and not again at the second."""
    run = ("train", "recipe=qwen35_vl_sft", "size=tiny", f"run.dir={tmp_path / 'run'}", *SHORT, "lora.rank=4")
    first = zoo(*run, "train.steps=3", "train.save_every=2", "export=false", cache=cache)
    second = zoo(*run, "train.steps=5", cache=cache)
    assert "resuming" in second
    kept = list((cache / "zoo" / "doctor").glob("*.json"))
    assert ("kernels are right" in first) == ON_GPU and len(kept) == int(ON_GPU)
    assert "checking the kernels" not in second
    lines = [json.loads(line) for line in (tmp_path / "run" / "train.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "grad_norm" in line]
    assert len(losses) >= 5 and losses[-1] < losses[0] * 1.05
    assert (tmp_path / "run" / "export" / "adapter_config.json").is_file()
    reports.append(f"qwen35_vl tiny, adapters: losses {losses}")


@pytest.mark.parametrize("recipe", ["qwen3_omni_sft", "llava_sft"])
def test_full_weights_are_trained(recipe: str, cache: Path, tmp_path: Path) -> None:
    run = ("train", f"recipe={recipe}", "size=tiny", f"run.dir={tmp_path / 'run'}", *SHORT)
    zoo(*run, "train.steps=3", "engine.doctor=false", cache=cache)
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file() or list(
        (tmp_path / "run" / "export").glob("*.safetensors")
    )


def under_ddp(recipe: Any, here: Any) -> tuple[Any, Any]:
    """The recipe's assembly, and its model with weights under mcore's DDP."""
    from zoo.checkpoint import initial_weights
    from zoo.model import build
    from zoo.training import optimization

    assembly = build.assemble(recipe)
    chunks = build.build_model(assembly, recipe, here)
    initial_weights.init_weights(chunks, assembly, recipe, here)
    (wrapped,) = optimization.wrap_ddp(chunks, recipe)
    return assembly, wrapped


def test_bf16_has_fp32_masters_and_gradients(tmp_path: Path) -> None:
    """Weights in bf16, their gradients summed and reduced in fp32, AdamW on fp32 weights, held as bf16 and 16 more bits."""
    from zoo.config.compose import load_recipe
    from zoo.config.validate import validate
    from zoo.training import optimization

    overrides = [
        "size=tiny",
        "hardware=cpu",
        "engine.precision=bf16",
        "train.lr=1e-6",
        "train.min_lr=0",
        "train.warmup_steps=0",
        f"run.dir={tmp_path}",
    ]
    recipe = validate(load_recipe("qwen3_vl_sft", overrides), 1)
    with single_process_world() as here:
        assembly, wrapped = under_ddp(recipe, here)
        optimizer, scheduler = optimization.build_optimizer([wrapped], recipe, assembly, here, 10)
        assert {p.dtype for p in wrapped.parameters()} == {torch.bfloat16}
        buffers = [*wrapped.buffers, *wrapped.expert_parallel_buffers]
        assert {buffer.grad_data.dtype for buffer in buffers} == {torch.float32}
        assert wrapped.ddp_config.grad_reduce_in_fp32
        before = _masters(optimizer)
        assert sum(m.numel() for m in before) == sum(p.numel() for p in wrapped.parameters())
        weights = [p.detach().clone() for p in wrapped.parameters()]
        for p in wrapped.parameters():
            p.main_grad.fill_(1e-3)  # type: ignore[attr-defined]
        scheduler.step(increment=1)
        optimizer.step()
        moved = [m for m, was in zip(_masters(optimizer), before, strict=True) if not torch.equal(m, was)]
        assert len(moved) == len(before), "a step of 1e-6 moves every fp32 weight"
        same = sum(int((p == was).sum()) for p, was in zip(wrapped.parameters(), weights, strict=True))
        assert same > 0.5 * sum(p.numel() for p in weights), "and is below the digits of most bf16 weights"


@pytest.mark.parametrize("backend", ["torch", *(["te"] if TE else [])])
def test_gradients_are_added_in_place(backend: str, tmp_path: Path, reports: list[str]) -> None:
    """By the matrix product itself on a GPU, and the same as those that autograd makes and DDP adds."""
    from zoo.config.compose import load_recipe
    from zoo.config.validate import validate
    from zoo.model import build

    overrides = ["size=tiny", "hardware=cpu", "engine.precision=bf16", f"run.dir={tmp_path}"]
    recipe = validate(load_recipe("qwen3_vl_sft", [*overrides, f"engine.backend={backend}"]), 1)
    switch = "fuse_wgrad_accumulation" if backend == "te" else "gradient_accumulation_fusion"
    with single_process_world() as here:
        assembly, wrapped = under_ddp(recipe, here)
        linears = [m for m in wrapped.modules() if getattr(m, switch, False)]
        assert (len(linears) > 4) == ON_GPU
        step, examples = build.build_step(assembly, recipe, here), vision_examples(assembly.processor)
        batch = packed_batch([examples[name].sample for name in ("image-long", "text-short")])
        found = []
        for in_place in (True, False):
            for linear in linears:
                setattr(linear, switch, in_place)
            wrapped.zero_grad_buffer()
            for _ in range(2):
                output, loss_function = step(iter([batch]), wrapped, loss_scale=1.0)
                loss_function(output)[0].backward()
            wrapped.finish_grad_sync()
            found.append({name: p.main_grad.clone() for name, p in wrapped.named_parameters()})
        errors = {
            name: float((grad - found[1][name]).norm() / found[1][name].norm())
            for name, grad in found[0].items()
            if found[1][name].norm() > 0
        }
        worst = max(errors, key=errors.__getitem__)
        reports.append(f"gradients in place, {backend}, {len(linears)} linears: {errors[worst]:.1e} ({worst})")
        assert errors[worst] < 1e-2


def _masters(optimizer: Any) -> list[torch.Tensor]:
    """Copies of this rank's fp32 weights: bf16 ones and the bits that complete them."""
    from zoo.optim import adamw

    adamw.allocate_state(optimizer)
    return [
        one.get_unscaled_state(parameter, adamw.MASTER).clone()
        for one in adamw.optimizers(optimizer)
        for group in one.param_groups
        for parameter in group["params"]
    ]
