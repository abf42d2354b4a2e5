"""From Hugging Face's layout to zoo's own weights and back: every family, in every layout that it is published in."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.config_keys import CASES, tiny_arch
from support.weights import differences, tensors
from torch import Tensor

from zoo.bridge import CheckpointError, SafetensorsFolder
from zoo.bridge.export import HeldTensors
from zoo.bridge.exported import ExportedTensors
from zoo.bridge.mapping.rules import Layout, Rule
from zoo.bridge.mapping.table import Entry
from zoo.config.locate import locate
from zoo.model.meta_model import build_meta_model
from zoo.tools.convert import convert

PASS_THROUGH = {"qwen3_omni": ("talker.a", "code2wav.b"), "qwen25_omni": ("talker.a", "token2wav.b")}


def published_layouts(entries: dict[str, Entry]) -> Iterator[dict[str, Layout]]:
    """By rule, every choice of the layouts that the model's tensors are published in."""
    kept: dict[str, Rule] = {e.rule.zoo: e.rule for e in entries.values() if e.rule.keeps_layout}
    for layouts in itertools.product(*(rule.layouts for rule in kept.values())):
        chosen = dict(zip(kept, layouts, strict=True))
        experts: dict[str, set[bool]] = {}
        for name, layout in chosen.items():
            experts.setdefault(name.rpartition(".")[0], set()).add(layout.per_expert)
        if all(len(kinds) == 1 for kinds in experts.values()):  # both matrices of an expert stand alike
            yield chosen


def write(folder: Path, arch: dict[str, Any], layouts: dict[str, Layout], carried: tuple[str, ...]) -> Path:
    """A checkpoint of random weights, without a tokenizer."""
    ours = build_meta_model(arch)
    found: dict[str, Tensor] = {name: torch.randn(3) for name in carried}
    for name, entry in ours.bridge.publish(ours.parameters).items():
        if entry.rule.writes(ours.dims):
            stored = Entry(name, entry.rule, layouts.get(entry.rule.zoo, entry.layout), entry.binding)
            shapes = stored.hf_shapes(ours.parameters[name].shape, ours.dims)
            found |= {hf: torch.randn(shape).bfloat16() for hf, shape in shapes.items()}
    folder.mkdir()
    save_file(found, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(arch))
    return folder


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("case", CASES)
def test_names_and_bytes_come_back_in_every_published_layout(case: str, tied: bool, tmp_path: Path) -> None:
    arch = {**tiny_arch(case), "tie_word_embeddings": tied}
    ours = build_meta_model(arch)
    assert ours.dims.tied == tied
    everything = list(published_layouts(ours.bridge.publish(ours.parameters)))
    assert len(everything) == (4 if case in ("qwen3_5_moe", "qwen3_5_moe_text") else 1)
    for number, layouts in enumerate(everything):
        source = write(tmp_path / f"in{number}", arch, layouts, PASS_THROUGH.get(CASES[case].name, ()))
        own = convert(source, tmp_path / f"zoo{number}", quiet=True)
        back = convert(own, tmp_path / f"out{number}", quiet=True)
        assert not differences(tensors(back), tensors(source))
        again = convert(back, tmp_path / f"again{number}", quiet=True)
        assert not differences(tensors(again / "weights"), tensors(own / "weights"))


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("mtp", [True, False], ids=["", "MTP carried"])
def test_an_export_of_a_model_that_began_with_zoos_own_weights(mtp: bool, frozen: bool, tmp_path: Path) -> None:
    """Experts stand as in the folder that zoo's weights were made of, whether zoo trains, freezes or carries them."""
    arch = tiny_arch("qwen3_5_moe")
    entries = build_meta_model(arch)
    layouts = {
        rule.zoo: rule.layouts[1]
        for rule in (entry.rule for entry in entries.bridge.publish(entries.parameters).values())
        if rule.keeps_layout
    }
    source = write(tmp_path / "in", arch, layouts, ())
    own = convert(source, tmp_path / "zoo", quiet=True)
    ours = build_meta_model(arch, None if mtp else ())
    shapes = {name: tuple(parameter.shape) for name, parameter in ours.parameters.items()}
    assert any(name.startswith("multi_token.") for name in shapes) == mtp
    with SafetensorsFolder(own / "weights") as reader:
        held = HeldTensors(
            reader, shapes, ours.bridge, ours.dims, arch, locate(str(own)), frozen=list(shapes) if frozen else []
        )
        with ExportedTensors(held) as exported:
            found = {name: exported.read(name).clone() for name in exported.names()}
    assert not differences(found, tensors(source))


def test_a_record_of_a_layout_that_is_not_known(tmp_path: Path) -> None:
    arch = tiny_arch("qwen3_5_moe")
    source = write(tmp_path / "in", arch, {}, ())
    own = convert(source, tmp_path / "zoo", quiet=True)
    about = json.loads((own / "zoo.json").read_text())
    about["layouts"] = {"multi_token.layers.0.mlp.experts.weight1": "mtp.layers.0.mlp.elsewhere"}
    (own / "zoo.json").write_text(json.dumps(about))
    with pytest.raises(CheckpointError, match=r"no layout of multi_token.*elsewhere"):
        convert(own, tmp_path / "out", quiet=True)
    about["layouts"] = {}
    (own / "zoo.json").write_text(json.dumps(about))
    assert not differences(tensors(convert(own, tmp_path / "out", quiet=True)), tensors(source))
