"""Parameters that a folder has in fp32 among bf16 ones stay in fp32: what comes out are the bytes that came in, and updates move all digits.

Every family holds whatever parameters its folder has in fp32: norms and decays compute with all digits, others are read rounded to bf16.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.engine import Zoo, packed_batch
from support.loops import engine_recipe, grpo, loop_batch, loop_examples
from support.matrix import MODELS
from support.pairs import Pair
from support.tiny import rewrite
from support.tiny_qwen35 import write_tiny_qwen35
from support.weights import tensors
from torch import Tensor

import zoo

BF16 = ("engine.precision=bf16", "packing.budget=4096", "train.lr=1e-2", "train.warmup_steps=0")
PUBLISHED = r"\.linear_attn\.(A_log|norm\.weight)$"


def mix(folder: Path, wide: Callable[[str], Any]) -> Path:
    """The folder in bf16, but for tensors of names that are `wide`, in fp32 with digits that bf16 has not."""

    def mixed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: one if not one.is_floating_point() else (one * 1.0017 if wide(name) else one.bfloat16())
            for name, one in tensors.items()
        }

    rewrite(folder, mixed)
    return folder


def published(folder: Path) -> dict[str, Tensor]:
    """The folder's tensors as zoo publishes them: a thinker by itself has names without a prefix."""
    found = tensors(folder)
    alone = any(name.startswith("audio_tower.layers") for name in found)
    return {f"thinker.{name}": one for name, one in found.items()} if alone else found


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() <= wanted.keys() and len(found) > 20
    differing = [
        name
        for name, one in found.items()
        if one.dtype != wanted[name].dtype or not torch.equal(one.cpu(), wanted[name])
    ]
    assert not differing, differing[:5]


def digits(tensor: Tensor) -> Tensor:
    """What of the values bf16 has not."""
    return tensor.float() - tensor.bfloat16().float()


def go_through(model: Any, folder: Path, *keys: str) -> None:
    """Bytes out are those in, before a step; a step gives what is in fp32 digits that bf16 has not."""
    stored = published(folder)
    wide = {name for name, one in stored.items() if one.dtype == torch.float32}
    with zoo.Engine.open(engine_recipe(folder, model, *BF16, *keys)) as engine:
        before = {name: one.clone() for name, one in engine.hf_weights()}
        same(before, stored)
        assert wide & before.keys()
        batch = loop_batch(loop_examples(folder, model)[:3])
        outcome = engine.train_step(batch, grpo, entropy=True)
        assert outcome.applied and torch.isfinite(torch.tensor(outcome.loss))
        after = {name: one.clone() for name, one in engine.hf_weights()}
        moved = {name for name in wide & after.keys() if not torch.equal(after[name], before[name])}
        assert len(moved) >= 0.5 * len(wide & after.keys())
        assert all(digits(after[name]).any() for name in moved)
        assert {name: one.dtype for name, one in after.items()} == {name: one.dtype for name, one in before.items()}


CHOSEN = ["vectors", "third 0", "third 1", "third 2"]
FAST = [("dense", "vectors"), ("dense", "third 0")]


@pytest.mark.parametrize(
    ("name", "which"),
    [
        pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow)
        for case in ((name, which) for name in MODELS for which in CHOSEN)
    ],
)
def test_what_comes_in_goes_out(name: str, which: str, tmp_path: Path) -> None:
    model = MODELS[name]
    folder = mixed_folder(name, which, tmp_path / "model")
    go_through(model, folder)
    zoo.convert(folder, tmp_path / "zoo", quiet=True)
    zoo.convert(tmp_path / "zoo", tmp_path / "hf", quiet=True)
    stored, back = published(folder), tensors(tmp_path / "hf")
    same({name: one for name, one in back.items() if name in stored}, stored)


def mixed_folder(name: str, which: str, folder: Path) -> Path:
    """A model of the matrix in bf16, with its `which` tensors in fp32."""
    folder = MODELS[name].write(folder)
    shapes = {key: one.ndim for key, one in tensors(folder).items()}
    chosen = {
        key
        for place, key in enumerate(sorted(shapes))
        if (shapes[key] < 2 if which == "vectors" else place % 3 == int(which[-1]))
    }
    return mix(folder, chosen.__contains__)


def test_decays_and_norms_of_linear_attention_compute_with_all_digits(tmp_path: Path, cpu_world: Any) -> None:
    """The share of the difference that rounding them makes to transformers' logits, and that zoo's have not."""
    folder = write_tiny_qwen35(tmp_path / "model")

    def to_the_middle(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights halfway between two values of bf16, which rounding moves most, and all the same way."""
        found = {}
        for name, one in tensors.items():
            rounded = one.bfloat16()
            if re.search(PUBLISHED, name):
                found[name] = (rounded.view(torch.int16).int() * 65536 + 0x7FFF).view(torch.float32)
            else:
                found[name] = rounded
        return found

    rewrite(folder, to_the_middle)
    family = ("model.family=qwen35_vl", "train.mtp_loss=0")
    pair = Pair.load(folder, cpu_world, *family, logits_limit=1e-4, gradients_limit=1e-4)
    exact = [row.detach() for row in pair.logits]  # transformers' in fp32, of these weights
    low = tmp_path / "low"
    low.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (low / file.name).write_bytes(file.read_bytes())
    save_file({k: v.bfloat16() for k, v in tensors(folder).items()}, low / "model.safetensors")
    rounded = Pair.load(low, cpu_world, *family, logits_limit=1e-4, gradients_limit=1e-4).logits
    made = Zoo.load(folder, cpu_world, *family, "engine.precision=bf16")
    found = made.logits(packed_batch(pair.samples))
    of_rounding = torch.cat([(a - b).flatten() for a, b in zip(exact, rounded, strict=True)])
    of_zoo = torch.cat([(a.float() - b).flatten() for a, b in zip(found, rounded, strict=True)])
    share = float(of_zoo @ of_rounding / of_rounding.square().sum())
    assert 0.7 < share < 1.3, share
