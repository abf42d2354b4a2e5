"""Parts of a model: frozen ones have no gradient, no optimizer state and no backward pass; others their own learning rate.

And stages of a pipeline without the towers are not given what towers read.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import adapt
from support.engine import load_model, packed_batch, recipe_for
from support.rows import vision_examples
from support.tiny_qwen3_vl import write_tiny_qwen3_vl
from support.weights import tensors

from zoo.checkpoint import initial_weights, loading
from zoo.checkpoint.export import export
from zoo.model import build
from zoo.training import optimization

FIRST = 5e-5  # how far AdamW moves a parameter in the first step, a twentieth of the warm-up to 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3_vl(tmp_path_factory.mktemp("parts"))


class Trained:
    """One optimizer step of the tiny model under `overrides`."""

    def __init__(self, folder: Path, world: Any, *overrides: str) -> None:
        recipe = recipe_for(folder, "train.lr=1e-3", "train.min_lr=1e-4", *overrides, recipe="qwen3_vl_sft")
        assembly, chunks = load_model(recipe, world)
        if recipe.lora.rank:
            adapt(chunks, assembly, recipe, world)
        build.freeze(chunks, recipe, assembly.family)
        self.wrapped = optimization.wrap_ddp(chunks, recipe)
        self.optimizer, scheduler = optimization.build_optimizer(self.wrapped, recipe, assembly, world, 10)
        self.family, self.model = assembly.family, chunks[0]
        self.before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.backward_through: set[str] = set()
        for part in ("vision", "decoder"):
            getattr(self.model, part).register_full_backward_hook(lambda *_, part=part: self.backward_through.add(part))
        step = build.build_step(assembly, recipe, world)
        examples = vision_examples(assembly.processor)
        batch = packed_batch([examples[name].sample for name in ("image-long", "video-short", "text-short")])
        self.wrapped[0].zero_grad_buffer()
        output, loss_function = step(iter([batch]), self.wrapped[0], loss_scale=1.0)
        loss_function(output)[0].backward()
        self.wrapped[0].finish_grad_sync()
        scheduler.step(1)
        self.optimizer.step()

    def moved(self, part: str) -> set[bool]:
        """Whether parameters of the part changed in the step."""
        return {
            not torch.equal(parameter, self.before[name])
            for name, parameter in self.model.named_parameters()
            if self.family.part_of(name) == part
        }

    @property
    def in_optimizer(self) -> int:
        """Elements that the optimizer holds fp32 weights or moments of."""
        inner = self.optimizer.chained_optimizers[0].optimizer
        return sum(p.numel() for group in inner.param_groups for p in group["params"])


@pytest.mark.parametrize(("frozen", "trained"), [("vision", "language"), ("language", "vision")])
def test_frozen_part(frozen: str, trained: str, folder: Path, cpu_world: Any) -> None:
    run = Trained(folder, cpu_world, f"model.freeze=[{frozen}]")
    assert run.moved(frozen) == {False}
    assert True in run.moved(trained)
    parts = {part: 0 for part in run.family.parts}
    for name, parameter in run.model.named_parameters():
        parts[run.family.part_of(name)] += parameter.numel()
        assert parameter.requires_grad == (run.family.part_of(name) == trained)
        assert hasattr(parameter, "main_grad") == parameter.requires_grad, name
    assert run.in_optimizer == parts[trained]
    if frozen == "vision":  # the decoder's backward pass leads to a frozen decoder's tower, not the other way round
        assert run.backward_through == {"decoder"}


def test_learning_rate_of_a_part(folder: Path, cpu_world: Any) -> None:
    """A tenth for the tower, in peak and end, with and without weight decay; the rest as the recipe has it."""
    run = Trained(folder, cpu_world, "train.lr_scale.vision=0.1")
    groups = run.optimizer.param_groups
    rates = {round(group["lr"], 9) for group in groups if group["params"]}
    assert len(rates) == 2
    low, high = sorted(rates)
    assert low == pytest.approx(0.1 * high, rel=1e-3)
    ends = [(group["max_lr"], group["min_lr"]) for group in groups if group["params"]]
    assert any(pair == pytest.approx((1e-4, 1e-5)) for pair in ends)
    assert any(pair == pytest.approx((1e-3, 1e-4)) for pair in ends)
    largest = {part: 0.0 for part in run.family.parts}  # AdamW's first step moves by the learning rate
    for name, parameter in run.model.named_parameters():
        part = run.family.part_of(name)
        largest[part] = max(largest[part], float((parameter - run.before[name]).abs().max()))
    assert largest["vision"] == pytest.approx(0.1 * largest["language"], rel=0.05)


def is_merger(name: str) -> bool:
    return name.startswith(("vision.merger.", "vision.deepstack_merger_list."))


@pytest.mark.parametrize(
    ("overrides", "trained"),
    [
        (["model.freeze=[merger]"], lambda name: not is_merger(name)),
        (["model.freeze=[vision]"], lambda name: not name.startswith("vision.")),
        (["model.freeze=[vision]", "train.lr_scale.merger=2"], lambda n: is_merger(n) or n[:7] != "vision."),
        (["model.freeze=[vision,language]", "train.lr_scale.merger=2"], is_merger),
        (["model.freeze=[merger,language]"], lambda n: n.startswith("vision.") and not is_merger(n)),
    ],
    ids=["all but it", "none of the tower", "the tower without it", "it alone", "its tower alone"],
)
def test_the_merger_is_a_part_where_a_key_names_it(
    overrides: list[str], trained: Any, folder: Path, cpu_world: Any
) -> None:
    run = Trained(folder, cpu_world, *overrides)
    for name, parameter in run.model.named_parameters():
        assert parameter.requires_grad == trained(name), name
    moved = {n: float((p - run.before[n]).abs().max()) for n, p in run.model.named_parameters()}
    assert {name for name, far in moved.items() if far} <= {name for name in moved if trained(name)}
    assert all(moved[name] for name in moved if is_merger(name) and trained(name))
    if "train.lr_scale.merger=2" in overrides:
        assert max(far for n, far in moved.items() if is_merger(n)) == pytest.approx(2 * FIRST, rel=0.05)
    if trained("vision.merger.norm.weight") and not trained("vision.pos_embed.weight"):
        assert run.backward_through >= {"decoder"}


def test_a_rate_of_the_merger_is_not_that_of_its_tower(folder: Path, cpu_world: Any) -> None:
    run = Trained(folder, cpu_world, "train.lr_scale.vision=0.1", "train.lr_scale.merger=3")
    moved = {n: float((p - run.before[n]).abs().max()) for n, p in run.model.named_parameters()}
    assert max(far for n, far in moved.items() if is_merger(n)) == pytest.approx(3 * FIRST, rel=0.05)
    tower = [far for n, far in moved.items() if n.startswith("vision.") and not is_merger(n)]
    assert max(tower) == pytest.approx(0.1 * FIRST, rel=0.05)


def test_b_of_adapters_has_a_rate_of_its_own(folder: Path, cpu_world: Any) -> None:
    """LoRA+: a factor for B beside that of its part. Groups as PEFT's `create_loraplus_optimizer` makes them."""
    lora = ("lora.rank=4", "lora.parts=[vision,language]", "lora.b_lr_scale=8", "train.lr_scale.vision=0.5")
    run = Trained(folder, cpu_world, *lora)
    moved = {n: float((p - run.before[n]).abs().max()) for n, p in run.model.named_parameters() if p.requires_grad}
    for part, of_part in (("vision", 0.5), ("language", 1.0)):
        for name, factor in ((".lora.a", 1.0), (".lora.b", 8.0)):
            far = max(far for n, far in moved.items() if n.endswith(name) and run.family.part_of(n) == part)
            assert far == pytest.approx(factor * of_part * FIRST, rel=0.05)


def test_adapters_of_the_merger_alone(folder: Path, cpu_world: Any) -> None:
    recipe = recipe_for(folder, "lora.rank=4", "lora.parts=[merger]", "model.freeze=[vision]", recipe="qwen3_vl_sft")
    assembly = build.assemble(recipe)
    chunks = build.build_model(assembly, recipe, cpu_world)
    adapters = initial_weights.attach_adapters(chunks, assembly, recipe, cpu_world)
    build.freeze(chunks, recipe, assembly.family)
    assert all(one.adapter.a.requires_grad for one in adapters.held)
    assert adapters.held and all(is_merger(one.target.zoo) for one in adapters.held)


def test_a_frozen_part_that_an_earlier_run_has_trained_is_exported_as_it_is(
    folder: Path, cpu_world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What that run started from has other weights of it."""
    recipe = recipe_for(folder, "model.freeze=[vision]", recipe="qwen3_vl_sft")
    assembly, chunks = load_model(recipe, cpu_world)
    build.freeze(chunks, recipe, assembly.family)
    with torch.no_grad():
        chunks[0].vision.merger.norm.weight.fill_(7.0)
    source = assembly.source
    assert source is not None
    monkeypatch.setattr(loading, "started_from", lambda run: source)
    of_run = export(chunks, tmp_path / "of_run", assembly, cpu_world, replace(source, kind="run"))
    of_folder = export(chunks, tmp_path / "of_folder", assembly, cpu_world, source)
    name = "model.visual.merger.norm.weight"
    assert bool((tensors(of_run)[name] == 7).all())
    torch.testing.assert_close(
        tensors(of_folder)[name], tensors(folder)[name], rtol=0, atol=0, msg="byte for byte: {}".format
    )


def test_media_go_to_the_stage_with_the_towers(folder: Path, cpu_world: Any) -> None:
    recipe = recipe_for(folder, recipe="qwen3_vl_sft")
    assembly = build.assemble(recipe)
    batch = packed_batch([vision_examples(assembly.processor)["image-long"].sample])
    first, second = (
        build.build_step(assembly, recipe, replace(cpu_world, pp_rank=rank, pp_size=2)).prepare(batch)[0]
        for rank in (0, 1)
    )
    assert first.media and not second.media
    torch.testing.assert_close(second.positions, first.positions)
    torch.testing.assert_close(second.targets, first.targets)
    torch.testing.assert_close(second.placements["vision"].rows, first.placements["vision"].rows)
