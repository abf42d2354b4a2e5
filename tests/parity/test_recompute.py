"""Full recompute: layers of decoder and towers keep their inputs alone, and gradients are to the bit those of layers that keep everything."""

import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import adapt
from support.engine import Zoo, packed_batch
from support.families import FAMILIES

import zoo.nn.decoder.mlp as mlp
import zoo.nn.multimodal as multimodal
import zoo.nn.towers.recompute as recompute
from zoo.model import build
from zoo.model.lora import seed_dropout
from zoo.nn.head import DistillationInputs, TopK, TopTokens

TOWERS = [name for name, family in FAMILIES.items() if family.parts != "language"]
ADAPTED = ("lora.rank=4", "lora.dropout=0.3", "lora.parts=[vision,language]")
CASES = [(name, ()) for name in TOWERS] + [
    ("qwen3_vl", ("model.freeze=[vision]",)),
    ("qwen3_vl", ("model.freeze=[language]",)),
    ("qwen3_vl", ADAPTED),
    ("qwen25_vl", ADAPTED),
]


def kept_by(model: Any, call: Any) -> tuple[Any, int, Counter[str]]:
    """What a call gives, bytes that autograd packs of it, and how often parts of each module of a list ran, by its name."""
    storages: dict[int, int] = {}
    runs: Counter[str] = Counter()

    def pack(x: torch.Tensor) -> torch.Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    hooks = []
    for name, module in model.named_modules():
        layer, _, part = name.rpartition(".")
        if layer.rpartition(".")[2].isdigit() and not part.isdigit():
            hooks.append(module.register_forward_pre_hook(lambda *_, layer=layer: runs.update([layer])))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = call()
    for hook in hooks:
        hook.remove()
    return result, sum(storages.values()), runs


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "overrides"), CASES, ids=[" ".join((name, *more)) for name, more in CASES])
def test_gradients_are_those_of_layers_that_keep_everything(
    name: str, overrides: tuple[str, ...], cpu_world: Any, tmp_path: Path
) -> None:
    family, found = FAMILIES[name], {}
    folder = family.write(tmp_path / "hf")
    for how in ("none", "full"):
        zoo = Zoo.load(folder, cpu_world, *family.keys, f"engine.recompute={how}", *overrides)
        build.freeze([zoo.model], zoo.recipe, zoo.assembly.family)
        if zoo.recipe.lora.rank:
            adapt([zoo.model], zoo.assembly, zoo.recipe, cpu_world)
            seed_dropout(zoo.recipe, 1, cpu_world)
        samples = [example.sample for example in family.examples(zoo.assembly.processor).values()]
        count = sum(sample.num_labels for sample in samples)
        batch = packed_batch(samples)
        found[how] = kept_by(zoo.model, lambda zoo=zoo, batch=batch, count=count: zoo.gradients([batch], count))
    ((loss, gradients), kept, runs), ((loss_again, again), kept_again, runs_again) = found["none"], found["full"]
    assert loss_again == loss and gradients.keys() == again.keys()
    for key, gradient in gradients.items():
        assert (gradient is None) == (again[key] is None), key
        assert gradient is None or torch.equal(gradient, again[key]), key
    assert kept_again < 0.65 * kept  # a tower of sound keeps what its convolutions make
    tower = "audio" if "audio" in family.parts else "vision"
    layers = {layer for layer in runs if layer.startswith(f"{tower}.") and layer.count(".") < 4}
    again = {layer for layer in layers if runs_again[layer] > 1.2 * runs[layer]}
    assert layers and again == (set() if overrides == ("model.freeze=[vision]",) else layers)


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen25_omni"])
def test_inputs_of_layers_wait_on_the_host(
    name: str, cpu_world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are copied there, each of decoder and towers; gradients are the same to the bit."""
    family, found, copied = FAMILIES[name], {}, []
    folder, plain = family.write(tmp_path / "hf"), torch.Tensor.copy_

    def copy(into: torch.Tensor, source: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        copied.append(source.shape)
        return plain(into, source, *args, **kwargs)

    for offload in (False, True):
        zoo = Zoo.load(
            folder, cpu_world, *family.keys, "engine.recompute=full", f"engine.offload_activations={offload}".lower()
        )
        samples = [example.sample for example in family.examples(zoo.assembly.processor).values()]
        batch, count = packed_batch(samples), sum(sample.num_labels for sample in samples)
        copied.clear()
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "copy_", copy)
            found[offload] = zoo.gradients([batch], count), len(copied)
    layers = [m for n, m in zoo.model.named_modules() if re.search(r"(layers|blocks)\.\d+$", n)]
    assert found[True][1] - found[False][1] >= len(layers)
    assert found[True][0][0] == found[False][0][0]
    for key, gradient in found[False][0][1].items():
        assert gradient is None or torch.equal(gradient, found[True][0][1][key]), key


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen35_vl experts", "gemma3"])
def test_a_long_row_goes_through_head_and_mlp_in_chunks(
    name: str, cpu_world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are those of the whole row but for the order of sums; no matrix is as large as all logits or all of an MLP."""
    family = FAMILIES[name]
    zoo = Zoo.load(family.write(tmp_path / "hf"), cpu_world, *family.keys, "engine.recompute=full")
    samples = [example.sample for example in family.examples(zoo.assembly.processor).values()]
    count, batch = sum(sample.num_labels for sample in samples), packed_batch(samples)
    loss, wanted = zoo.gradients([batch], count)
    assert count > 30 and batch.input_ids.shape[1] > 90
    rows: dict[str, int] = {"head": 0, "mlp": 0}

    def note(part: str, x: torch.Tensor) -> None:
        rows[part] = max(rows[part], len(x))

    zoo.model.output_layer.register_forward_pre_hook(lambda _, inputs: note("head", inputs[0]))
    for layer in zoo.model.decoder.layers:  # type: ignore[union-attr]
        for module in layer.mlp.modules():
            if isinstance(module, mlp.DenseMLP):
                module.linear_fc1.register_forward_pre_hook(lambda _, inputs: note("mlp", inputs[0]))
    zoo.gradients([batch], count)
    assert rows["head"] == count and rows["mlp"] >= batch.input_ids.shape[1]
    rows.update(head=0, mlp=0)
    monkeypatch.setattr(multimodal, "LABELS_AT_ONCE", 7)
    monkeypatch.setattr(mlp, "TOKENS_AT_ONCE", 30)
    loss_again, found = zoo.gradients([batch], count)
    assert rows == {"head": 7, "mlp": 30}
    assert loss_again == pytest.approx(loss, rel=1e-6)
    for key, gradient in wanted.items():
        if gradient is not None:
            error = float((found[key] - gradient).norm() / gradient.norm().clamp(min=1e-3))
            assert error < 3e-6, (key, error)


@pytest.mark.parametrize("asked", ["evaluate", "entropy", "temperature", "distillation", "top"])
def test_what_else_is_asked_of_labels_is_the_same_in_chunks(
    asked: str, cpu_world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = FAMILIES["qwen3_vl"]
    zoo = Zoo.load(family.write(tmp_path / "hf"), cpu_world, *family.keys)
    samples = [example.sample for example in family.examples(zoo.assembly.processor).values()]
    options: dict[str, Any] = {"evaluate": asked == "evaluate", "entropy": asked == "entropy"}
    if asked in ("entropy", "temperature"):
        options |= {"logprobs": True, "temperature": torch.linspace(0.5, 2.0, len(samples))}
    inputs, _ = zoo.step().prepare(packed_batch(samples), **options)
    count = len(inputs.targets)
    if asked == "top":
        inputs = replace(inputs, top=TopK(3, 1.5))
    elif asked == "distillation":
        ids = torch.stack([torch.randperm(50)[:4] for _ in range(count)])
        logprobs = torch.randn(count, 5).log_softmax(-1)
        inputs = replace(inputs, distillation=DistillationInputs(TopTokens(ids, logprobs[:, :4], logprobs[:, 4]), 2.0))
    whole = zoo.model(inputs)
    monkeypatch.setattr(multimodal, "LABELS_AT_ONCE", 7)
    torch.testing.assert_close(zoo.model(inputs), whole, rtol=1e-5, atol=1e-5)


def test_a_frozen_layer_copies_nothing_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []
    monkeypatch.setattr(recompute, "on_host", lambda: copied.append(1) or nullcontext())
    tower = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(4, 4)])})
    recompute.recompute_layers(tower, offload=True)
    (layer,) = tower["layers"]
    assert layer(torch.ones(2, 4)).requires_grad and len(copied) == 1
    layer.requires_grad_(False)
    assert not layer(torch.ones(2, 4)).requires_grad and len(copied) == 1
    assert layer(torch.ones(2, 4, requires_grad=True)).requires_grad and len(copied) == 2
