"""A decoder whose layers are captured for rows of a size, with what is recorded done again each time: gradients are those of the layers."""

from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from support.adapters import adapt
from support.engine import Zoo, packed_batch
from support.recorded_again import RecordedAgain, go_by_lengths
from support.stacks import TINY
from support.tiny_qwen3_vl import write_tiny_qwen3_vl

import zoo.model.graphs as graphs_of_models
import zoo.nn.towers.attention as towers
from zoo.config.compose import about
from zoo.model.graphs import use_graphs
from zoo.model.lora import seed_dropout
from zoo.nn.graphs import random
from zoo.nn.graphs.layers import release_graphs
from zoo.nn.graphs.row import static_tokens

# Decoders without experts. A row of gemma3 or gemma4 with an image, whose tokens see one another both ways, is not captured.
DENSE = ("qwen3_vl", "qwen35_vl", "llava onevision", "internvl", "qwen25_vl", "qwen3_asr", "qwen25_omni", "gemma3", "gemma3_text", "gemma4")  # fmt: skip
BOTH_WAYS = ("gemma3", "gemma4")


def loaded(name: str, folder: Path, world: Any, *overrides: str) -> tuple[Zoo, list[Any]]:
    stack = TINY[name]
    family = about(stack.recipe)["family"]
    zoo = Zoo.load(stack.write(folder), world, f"model.family={family}", "train.mtp_loss=0", *overrides)
    if zoo.recipe.lora.rank:
        adapt([zoo.model], zoo.assembly, zoo.recipe, world)
    for parameter in zoo.model.parameters():
        parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
        parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    assert use_graphs([zoo.model]) >= 1
    if zoo.model.decoder.graphs is not None:  # type: ignore[union-attr]
        zoo.model.decoder.graphs.recorder = RecordedAgain()  # type: ignore[union-attr]
    return zoo, [example.sample for example in stack.examples(zoo.assembly.processor).values()]


def compare(zoo: Zoo, rest: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Hold gradients, in DDP's buffers and beside them, against the wanted ones; then empty the buffers."""
    for key, parameter in zoo.model.named_parameters():
        if (want := wanted.get(key)) is None:
            continue
        own = parameter.main_grad + (0 if rest[key] is None else rest[key])  # type: ignore[attr-defined, operator]
        rounding = 1e-6 + 1e-5 * float(want.abs().max())
        torch.testing.assert_close(own, want, rtol=1e-4, atol=rounding, msg=lambda m, key=key: f"{key}: {m}")
        parameter.main_grad.zero_()  # type: ignore[attr-defined]


FEW_TRAINED = [
    ("qwen3_vl", "lora.rank=4", "lora.parts=[language]"),
    ("qwen35_vl", "lora.rank=4", "lora.parts=[language]"),
    ("qwen3_vl", "lora.rank=4", "lora.parts=[language]", "lora.base_dtype=fp8"),
    ("qwen35_vl", "lora.rank=4", "lora.parts=[language]", "lora.base_dtype=fp8"),
    ("qwen3_vl", "model.freeze=[vision]"),
    ("qwen35_vl", "model.freeze=[language]"),
]


@pytest.mark.parametrize("case", [(name,) for name in DENSE] + FEW_TRAINED, ids=" ".join)
def test_a_captured_decoder_has_the_gradients_of_its_layers(
    case: tuple[str, ...], cpu_world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = case[0]
    zoo, samples = loaded(name, tmp_path / "model", cpu_world, *case[1:])
    go_by_lengths(monkeypatch)
    graphs = zoo.model.decoder.graphs
    count = sum(one.num_labels for one in samples)
    zoo.model.decoder.graphs = None  # type: ignore[assignment, union-attr]
    loss, wanted = zoo.gradients([packed_batch(samples)], count)
    zoo.model.decoder.graphs = graphs  # type: ignore[assignment, union-attr]
    for _ in range(2):  # captured, then replayed
        found, rest = zoo.gradients([packed_batch(samples)], count)
        assert found == pytest.approx(loss, rel=1e-6)
        compare(zoo, rest, wanted)
    pieces = 0 if name in BOTH_WAYS else 2 * len(graphs.starts)  # type: ignore[union-attr, arg-type]
    assert graphs.recorder.records == pieces  # type: ignore[union-attr]
    assert bool(graphs._captured) == bool(pieces)  # type: ignore[union-attr]
    release_graphs([zoo.model])
    assert graphs.recorder.released and not graphs._captured  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "case",
    [("qwen3_vl",), ("qwen25_vl",), ("qwen25_omni",), ("glm45v",), ("qwen25_vl", "lora.rank=4", "lora.parts=[vision]")],
    ids=" ".join,
)
def test_a_captured_tower_has_the_gradients_of_its_blocks(
    case: tuple[str, ...], cpu_world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows, frames and what is behind a row, in rows of several sizes by turns; blocks run as transformers has them."""
    name = case[0]
    zoo, samples = loaded(name, tmp_path / "model", cpu_world, *case[1:])
    if zoo.model.decoder is not None:
        zoo.model.decoder.graphs = None
    (tower,) = (part for part in zoo.model.modules() if any(hasattr(b, "number") for b in getattr(part, "blocks", ())))
    graphs: Any = tower.blocks[0].graphs  # type: ignore[index, union-attr]
    graphs.recorder = RecordedAgain()
    monkeypatch.setattr(towers, "_run_block", _plain_block)
    segments = towers._segments
    monkeypatch.setattr(towers, "_segments", lambda lengths, device: segments(tuple(filter(None, lengths)), device))
    with_media = [one for one in samples if "pixel_values" in one.media or "pixel_values_videos" in one.media]
    rows = [samples, with_media[:1], with_media[1:], samples, with_media[:1]]
    plain = [zoo.gradients([packed_batch(row)], 1) for row in rows]
    for block in tower.blocks:  # type: ignore[union-attr]
        block.forward = MethodType(_block_in_graphs, block)
    for row, (loss, wanted) in zip(rows, plain, strict=True):
        for buffer in graphs._buffers.values():
            buffer.zero_()  # this recorder does the work that it records, with the gradient of the row before
        found, rest = zoo.gradients([packed_batch(row)], 1)
        assert found == pytest.approx(loss, rel=1e-6)
        compare(zoo, rest, wanted)
    sizes = len(graphs._captured)
    assert 1 < sizes <= 3 and graphs.recorder.records == 2 * len(graphs.starts) * sizes
    windows = {block.window for block in tower.blocks}  # type: ignore[union-attr]
    assert (len(windows) > 1) == name.startswith("qwen25")


def _plain_block(block: Any, states: Any, cu_seqlens: Any, angles: Any, **further: Any) -> Any:
    return type(block).forward(block, states, cu_seqlens, position_embeddings=angles, **further)


def _block_in_graphs(block: Any, states: Any, cu_seqlens: Any, position_embeddings: Any, **further: Any) -> Any:
    graphs = towers._graphs(block, states, cu_seqlens, position_embeddings)
    if graphs is None:
        return _plain_block(block, states, cu_seqlens, position_embeddings, **further)
    return graphs.replay(block.number, states)


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen35_vl"])
def test_dropout_is_drawn_anew_at_each_replay_and_follows_from_its_seeds(
    name: str, cpu_world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters = ("lora.rank=4", "lora.parts=[language]", "lora.dropout=0.4")
    zoo, samples = loaded(name, tmp_path / "model", cpu_world, *adapters)
    go_by_lengths(monkeypatch)
    graphs, recipe = zoo.model.decoder.graphs, zoo.recipe
    # Masks are of as many tokens with graphs and without.
    size = static_tokens(sum(len(one.input_ids) for one in samples))
    zoo.model.decoder.graphs = None  # type: ignore[assignment, union-attr]
    seed_dropout(recipe, 3, cpu_world)
    with random.inside():
        plain = [zoo.gradients([packed_batch(samples)], 1, pad_to=size) for _ in range(2)]
    assert abs(plain[0][0] - plain[1][0]) > 1e-3, "other masks"
    zoo.model.decoder.graphs = graphs  # type: ignore[assignment, union-attr]
    for _ in range(2):  # captured in between, and not
        seed_dropout(recipe, 3, cpu_world)
        for loss, wanted in plain:
            found, rest = zoo.gradients([packed_batch(samples)], 1, pad_to=size)
            assert found == pytest.approx(loss, rel=1e-6)
            compare(zoo, rest, wanted)
    seed_dropout(recipe, 4, cpu_world)
    assert abs(zoo.gradients([packed_batch(samples)], 1, pad_to=size)[0] - plain[0][0]) > 1e-3


def test_what_goes_by_lengths_is_refused_rather_than_wrong(cpu_world: Any, tmp_path: Path) -> None:
    zoo, samples = loaded("qwen3_vl", tmp_path / "model", cpu_world)
    with pytest.raises(RuntimeError, match=r"differ from row to row; set engine\.cuda_graphs=false"):
        zoo.gradients([packed_batch(samples)], 1)


def test_a_stack_without_a_kernel_for_packed_rows_is_left_out_and_said(
    cpu_world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_qwen3_vl(tmp_path / "model")
    zoo = Zoo.load(folder, cpu_world, "model.family=qwen3_vl", "train.mtp_loss=0")
    weight = torch.empty(0, dtype=torch.bfloat16)
    assert graphs_of_models._missing_attention(weight, 20) == (
        "no attention kernel for packed rows takes heads of 20 in torch.bfloat16"
    )
    monkeypatch.setattr(graphs_of_models, "_missing_in_decoder", lambda decoder: "heads of 20")
    with pytest.warns(UserWarning, match="layers of the decoder run without: heads of 20"):
        assert use_graphs([zoo.model]) == 1
    assert zoo.model.decoder.graphs is None  # type: ignore[union-attr]
