"""One setting of `zoo bench train` under transformers alone: what a plain training script does on one GPU.

The same architecture from random weights, in bf16 with SDPA attention; batches padded to the longest or to a width;
AdamW in one fused kernel, in bf16 as the weights are (no fp32 copy of them, so less memory and less arithmetic than zoo's);
gradients clipped at 1. Batches come from pinned memory, as zoo's do.
"""

from __future__ import annotations

import inspect
import time
from typing import TYPE_CHECKING, Any

import torch

from zoo.bench.training.profile import profile
from zoo.bench.training.receipts import with_pixels
from zoo.bench.training.rows import Example, collate, examples
from zoo.bench.training.setting import LEAST_TIMED, Setting, Timed, metrics, train_flops
from zoo.bench.training.steps import kernels
from zoo.config.schema import Recipe
from zoo.data.sample import IGNORE, Sample, collate_padded
from zoo.logging.memory_use import memory
from zoo.logging.run_log import environment
from zoo.logging.startup_time import Startup
from zoo.model import build
from zoo.nn.decoder.attention.delta_rule_settings import use_shipped_settings
from zoo.nn.flops import model_cost
from zoo.tools.hf_score import transformers_class
from zoo.types import JsonObject

if TYPE_CHECKING:
    from zoo.model.build import Assembly


def measure(recipe: Recipe, request: JsonObject) -> JsonObject:
    """Metrics of the setting; {"oom": True} where the GPU's memory doesn't suffice."""
    try:
        return _measure(recipe, request)
    except torch.OutOfMemoryError as error:
        return {"oom": True, "why": str(error).partition(". ")[0], "environment": environment()}


def _measure(recipe: Recipe, request: JsonObject) -> JsonObject:
    startup = Startup("imports")
    if torch.cuda.is_available():
        use_shipped_settings()  # the delta rule has the same settings on both sides
    setting = Setting(**request["setting"])
    assembly = build.assemble(recipe)
    config = assembly.config
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    samples = examples(assembly, request["samples"], request["longest"])
    bins = setting.bins([example.sample for example in samples], 1, [])
    batches = [_batch([samples[i] for i in rows], config, setting.width, dtype) for rows in bins]
    startup.mark("data")
    model = _model(recipe, config.root, device, dtype)
    startup.mark("model")
    accepted = inspect.signature(model.forward).parameters
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.train.lr, weight_decay=recipe.train.weight_decay, fused=on_gpu
    )
    warm = _whole_passes(request["warm_steps"], len(bins))
    steps = _whole_passes(max(LEAST_TIMED, request["passes"] * len(bins)), len(bins))
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    losses: list[float] = []
    norm = torch.zeros(())

    def train_step() -> None:
        nonlocal norm
        began = time.perf_counter()
        inputs = batches[len(times) % len(bins)]
        batch = {name: x.to(device, non_blocking=True) for name, x in inputs.items() if name in accepted}
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.train.clip_grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
        if on_gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)

    train_step()
    startup.mark("first step")
    while len(times) < warm + steps:
        train_step()
    rows = [[samples[i].sample for i in example] for example in bins]
    timed = _timed(times[warm:], rows, [batch["input_ids"].numel() for batch in batches], assembly)
    return {
        **metrics(setting, timed, torch.cuda.get_device_name() if on_gpu else ""),
        **memory(on_gpu),
        "loss": losses[-1],
        "losses": [round(loss, 4) for loss in losses],
        "grad_norm": float(norm),
        "parameters": sum(p.numel() for p in model.parameters()),
        "startup_s": startup.seconds,
        "startup": startup.stages,
        "warm_s": round(sum(times[:warm]) / 1e3, 2),
        "warm_steps": warm,
        "kernels": {**kernels([]), "core_attention": f"transformers' {setting.backend}"},
        **({"profile": profile(train_step)} if request["profile"] else {}),
        "environment": environment(),
    }


def _whole_passes(least: int, batches: int) -> int:
    """Steps, at least so many, in which every batch comes equally often."""
    return -(-max(least, batches) // batches) * batches


def _timed(times: list[float], rows: list[list[Sample]], widths: list[int], assembly: Assembly) -> list[Timed]:
    """A record for each timed step; `rows` and `widths` (tokens with padding) are those of the batches, in turn."""
    cost, timed = model_cost(assembly.config), []
    for step, ms in enumerate(times):
        samples, width = rows[step % len(rows)], widths[step % len(rows)]
        real = sum(sample.length for sample in samples)
        towers: dict[str, list[float]] = {name: [] for name in cost.towers}
        for sample in samples:
            for name, items in assembly.processor.tower_rows(sample.media).items():
                towers[name] += items
        labels = sum(sample.num_labels for sample in samples)
        flops = train_flops(cost, [sample.length for sample in samples], labels, towers)
        timed.append(Timed(ms, len(samples), real, width, flops))
    return timed


def _model(recipe: Recipe, config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """transformers' model of the architecture, made on the device with random weights."""
    kind = transformers_class(recipe.model.arch)
    config._attn_implementation = "sdpa"
    torch.manual_seed(recipe.run.seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = kind(config)
    finally:
        torch.set_default_dtype(before)
    return model.train()


def _batch(rows: list[Example], config: Any, width: int | None, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Arguments of transformers' models, in pinned memory where there is a GPU; what is no whole number is of `dtype`."""
    if rows[0].features:
        batch = collate([row.features for row in rows], width)
    else:
        padded = collate_padded([with_pixels(row.sample, config) for row in rows], pad_to=width)
        assert padded.attention_mask is not None
        batch = {
            "input_ids": padded.input_ids,
            "attention_mask": padded.attention_mask.long(),
            "labels": padded.labels,
            "pixel_values": padded.media["pixel_values"],
            "image_grid_thw": padded.media["image_grid_thw"],
            "mm_token_type_ids": (padded.input_ids == config.root.image_token_id).long(),
        }
    assert int((batch["labels"] != IGNORE).sum()) > 0
    batch = {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()}
    return {name: x.pin_memory() for name, x in batch.items()} if torch.cuda.is_available() else batch
