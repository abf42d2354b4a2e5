"""Gradients that are added to DDP's buffer by the matrix product itself are those that autograd sums."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.engine import load_model, packed_batch, recipe_for
from support.rows import vision_examples
from support.tiny_qwen35 import write_tiny_qwen35

from zoo.model import build
from zoo.nn import kernels, weight_gradients
from zoo.nn.decoder.experts import products
from zoo.training import optimization


@pytest.fixture(scope="module", params=["tied", "untied", "experts", "tied, one depth"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind = request.param
    return write_tiny_qwen35(
        tmp_path_factory.mktemp(kind),
        tied=kind.startswith("tied"),
        moe=kind == "experts",
        mtp=2 if kind in ("tied", "untied") else 0,
    )


def summed(folder: Path, world: Any, *overrides: str, in_place: bool) -> tuple[int, dict[str, torch.Tensor]]:
    """How many linears add in place, and each parameter's gradient of two micro-batches."""
    recipe = recipe_for(folder, *overrides, recipe="qwen35_vl_sft")
    assembly, chunks = load_model(recipe, world)
    build.freeze(chunks, recipe, assembly.family)
    (wrapped,) = optimization.wrap_ddp(chunks, recipe)
    count = weight_gradients.accumulate_in_place(chunks) if in_place else 0
    step, examples = build.build_step(assembly, recipe, world), vision_examples(assembly.processor)
    wrapped.zero_grad_buffer()
    for name in ("image-long", "text-short"):
        output, loss_function = step(iter([packed_batch([examples[name].sample])]), wrapped, loss_scale=1.0)
        loss_function(output)[0].backward()
    wrapped.finish_grad_sync()
    return count, {name: p.main_grad.clone() for name, p in chunks[0].named_parameters() if p.requires_grad}


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "overrides",
    [(), ("model.freeze=[vision]",), ("engine.recompute=selective",), ("engine.recompute=full",)],
    ids=["trained", "frozen tower", "partly recomputed", "recomputed"],
)
def test_the_gradient_is_the_same(
    overrides: tuple[str, ...], folder: Path, cpu_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[torch.Tensor] = []
    plain = weight_gradients._Products.wgrad_gemm_accum_fp32

    add = products.accumulate

    def accumulate(total: torch.Tensor, grad: torch.Tensor) -> None:
        made.append(total)
        add(total, grad)

    monkeypatch.setattr(products, "accumulate", accumulate)

    def product(x: torch.Tensor, grad: torch.Tensor, total: torch.Tensor) -> None:
        made.append(total)
        plain(x, grad, total)

    towers: list[torch.Tensor] = []

    def tower_product(total: torch.Tensor, grad: torch.Tensor, x: torch.Tensor) -> None:
        towers.append(total)
        plain(x, grad, total)

    rows: list[torch.Tensor] = []
    embed = weight_gradients._Embedding.backward

    def embed_backward(ctx: Any, grad: torch.Tensor) -> Any:
        rows.append(grad)
        return embed(ctx, grad)

    monkeypatch.setattr(weight_gradients._Embedding, "backward", staticmethod(embed_backward))
    monkeypatch.setattr(kernels, "add_product", tower_product)
    monkeypatch.setattr(weight_gradients._Products, "wgrad_gemm_accum_fp32", staticmethod(product))
    _, wanted = summed(folder, cpu_world, *overrides, in_place=False)
    assert not made
    count, found = summed(folder, cpu_world, *overrides, in_place=True)
    # The tower has three blocks and a merger, and runs in one micro-batch alone.
    of_towers = 0 if "model.freeze=[vision]" in overrides else 14
    assert len(towers) == of_towers
    assert len(rows) >= 2, "the embedding, in each micro-batch"
    decoders = count - of_towers
    assert decoders > 10 and len(made) >= 2 * decoders, "each linear, of each micro-batch"
    assert wanted.keys() == found.keys()
    for name, grad in wanted.items():
        assert float(grad.abs().max()) > 0, name
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize(("fp8", "trained", "found"), [(None, True, 1), ("hybrid", True, 0), (None, False, 0)])
def test_linears_of_transformer_engine(fp8: str | None, trained: bool, found: int) -> None:
    """They have a switch of their own, and would write over the buffer in what they take for the first micro-batch."""
    linear: Any = torch.nn.Linear(2, 2, bias=False)
    linear.fuse_wgrad_accumulation, linear.is_first_microbatch = False, True
    linear.config = SimpleNamespace(fp8=fp8)
    if trained:
        linear.weight.main_grad = torch.zeros(2, 2)
    assert weight_gradients.accumulate_in_place([linear]) == found
    assert (linear.fuse_wgrad_accumulation, linear.is_first_microbatch) == (bool(found), not found)
