"""FLOPs that the arithmetic of lengths gives, against those that PyTorch counts in a real forward and backward pass."""

from typing import Any

import pytest
import torch
from support.engine import single_process_world
from support.tiny import RECIPES
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from zoo.config.compose import load_recipe
from zoo.config.validate import validate
from zoo.data.loading.sample_source import SampleSource
from zoo.data.sample import IGNORE, collate
from zoo.model import build
from zoo.nn.flops import model_cost
from zoo.packing import PackedLayout
from zoo.packing.cost import TALKER

ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def _counter() -> Any:
    """PyTorch's counter, which knows no attention of the CPU."""
    ops = torch.ops.aten

    def forward(query: Any, key: Any, value: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
        return sdpa_flop_count(query, key, value)

    def backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return sdpa_backward_flop_count(grad, query, key, value)

    mapping = {getattr(ops, ATTENTION): forward, getattr(ops, f"{ATTENTION}_backward"): backward}
    return FlopCounterMode(display=False, custom_mapping=mapping)


@pytest.mark.sampled(20)
@pytest.mark.parametrize(("name", "size"), RECIPES)
def test_flops_of_a_sample_by_part(name: str, size: str) -> None:
    recipe = validate(load_recipe(name, [f"size={size}", "hardware=cpu", "data.augment=0"]), 1)
    with single_process_world() as world:
        assembly = build.assemble(recipe)
        (model,) = build.build_model(assembly, recipe, world)
        step = build.build_step(assembly, recipe, world)
        source = SampleSource.open(recipe.data.train, assembly.processor, recipe.data, budget=1024, max_rows=400)
        samples = [source.sample(visit) for visit in range(len(source))]
        chunk = 2 * getattr(getattr(assembly.config.root, "audio_config", None), "n_window", 0)
        samples = sorted((one for one in samples if _is_even(one, chunk)), key=lambda sample: sample.length)
        longest = {sample.kind: sample for sample in samples}
        assert len(longest) > 1 or assembly.family.modalities == ("text",)
        ran = {tower: _layers_that_run(getattr(model, tower)) for tower in assembly.config.tower_costs()}
        for sample in longest.values():
            batch = collate([sample], PackedLayout.from_lengths([sample.length]))
            rows = {
                tower: [rows for stream in streams for rows in stream.rows]
                for tower, streams in step.media_streams(batch.media).items()
            }
            with _counter() as forward:
                output, loss_of = step(iter([batch]), model, loss_scale=1.0)
                loss, _ = loss_of(output)
            with _counter() as backward:
                loss.backward()
            counted = _by_part(forward.get_flop_counts(), list(assembly.config.tower_costs()))
            cost = model_cost(assembly.config, recipe)
            # The CPU computes all pairs of a causal layer, the model needs those that look back.
            pairs = (cost.decoder.per_pair + sum(cost.decoder.windows.values())) * sample.length**2
            causal = cost.decoder.flops(sample.length) - cost.decoder.per_token * sample.length
            parts = cost.parts([sample.length], sample.num_labels, rows)
            parts["decoder"] += pairs - causal
            for part, flops in parts.items():
                assert flops == pytest.approx(counted[part], rel=0.1), (sample.kind, part)
            total = sum(counted.values())
            assert 3 * total == pytest.approx(total + backward.get_total_flops(), rel=0.1)
        assert {name: len(layers) for name, layers in ran.items()} == {
            name: tower.layers for name, tower in cost.towers.items()
        }


@pytest.mark.parametrize("name", ["qwen3_omni_talker_sft", "qwen3_omni_speech_sft", "qwen25_omni_talker_sft"])
def test_flops_of_a_spoken_sample(name: str) -> None:
    recipe = validate(load_recipe(name, ["size=tiny", "hardware=cpu", "data.augment=0"]), 1)
    with single_process_world() as world:
        assembly = build.assemble(recipe)
        (model,) = build.build_model(assembly, recipe, world)
        step = build.build_step(assembly, recipe, world)
        source = SampleSource.open(recipe.data.train, assembly.processor, recipe.data, budget=1024, max_rows=40)
        samples = [source.sample(visit) for visit in range(len(source))]
        sample = max((one for one in samples if one.kind == "image"), key=lambda one: one.codes)
        batch = collate([sample], PackedLayout.from_lengths([sample.length]))
        frames = assembly.processor.size(sample).media[TALKER]
        assert frames == [sample.codes - 1]
        with _counter() as forward:
            output, loss_of = step(iter([batch]), model, loss_scale=1.0)
            loss_of(output)
        counted = _by_part(forward.get_flop_counts(), list(assembly.config.tower_costs()))
        cost = model_cost(assembly.config, recipe)
        labels = int((sample.labels != IGNORE).sum())
        parts = cost.parts([sample.length], labels, {TALKER: frames})
        assert cost.talker is not None
        (tokens,) = cost.talker.tokens([sample.length], labels, frames)
        assert tokens == pytest.approx(step.talker_row(batch.input_ids, batch.layout, batch.media).layout.total, abs=3)
        # The CPU computes all pairs.
        parts["decoder"] += cost.decoder.per_pair * sample.length * (sample.length - 1) / 2
        parts[TALKER] += cost.talker.decoder.per_pair * tokens * (tokens - 1) / 2
        # The talker is no module that is called: PyTorch's counter has it with the decoder.
        parts["decoder"] += parts[TALKER]
        assert parts["decoder"] == pytest.approx(counted["decoder"], rel=0.05)
        assert parts["head"] == pytest.approx(counted["head"], rel=0.1)


def _layers_that_run(tower: torch.nn.Module) -> set[int]:
    """Numbers of the tower's layers, which come in as they run."""
    found: set[int] = set()
    stacks = [module for module in tower.modules() if isinstance(module, torch.nn.ModuleList)]
    for number, layer in enumerate(max(stacks, key=len)):
        layer.register_forward_hook(lambda *_, number=number: found.add(number))
    return found


def _is_even(sample: Any, chunk: int) -> bool:
    """Whether convolutions of sound see little padding: clips go in by chunks, all as long as the longest."""
    frames = sample.media["feature_lens"].tolist() if "feature_lens" in sample.media else []
    pieces = [piece for count in frames for piece in [chunk] * (count // chunk) + [count % chunk] if piece]
    return not pieces or max(pieces) * len(pieces) < 1.05 * sum(pieces)


def _by_part(counts: Any, towers: list[str]) -> dict[str, float]:
    """Counted FLOPs: head, towers (with what belongs to them), and the decoder with all else."""
    by_module = {name: sum(ops.values()) for name, ops in counts.items() if name.count(".") == 1}
    found = {"head": float(sum(f for n, f in by_module.items() if n.endswith(".output_layer")))}
    for tower in towers:
        own = (f".{tower}", ".projector") if tower == towers[0] else (f".{tower}",)
        found[tower] = float(sum(f for n, f in by_module.items() if n.endswith(own)))
    found["decoder"] = float(sum(counts["Global"].values())) - sum(found.values())
    return found
