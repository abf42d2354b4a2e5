"""Quantised folders: block-scaled FP8 is read as transformers reads it, everything else is refused by name."""

import json
from pathlib import Path
from typing import Any

import bridge_fakes as fakes
import pytest
import torch
from bridge_fakes import Tiny
from safetensors.torch import load_file, save_file
from support.quantise import plain, quantise, state, write_fp8
from torch import Tensor

from zoo.bridge import SafetensorsFolder, ShardInfo, export_hf, load_hf
from zoo.bridges.qwen3_omni import BRIDGE
from zoo.config.locate import quantisation, unquantised
from zoo.errors import UserError

FP8 = {"quant_method": "fp8", "weight_block_size": [4, 6], "activation_scheme": "dynamic"}
BLOCK = (4, 6)


def write(folder: Path, tensors: dict[str, Tensor], how: Any = FP8) -> Path:
    save_file(tensors, folder / "model.safetensors")
    if how is not None:
        state(folder, how)
    return folder


def pair(name: str, shape: tuple[int, ...], scale: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    raw, factors = quantise(torch.randn(shape), BLOCK, scale)
    return {name: raw, f"{name}_scale_inv": factors}


def same(found: Tensor, wanted: Tensor) -> bool:
    return wanted.dtype == torch.bfloat16 and fakes.same_bytes(found.contiguous(), wanted.contiguous())


@pytest.mark.parametrize("shape", [(8, 12), (4, 6), (3, 16, 18)], ids=str)
@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16], ids=str)
def test_as_transformers_dequantises(tmp_path: Path, shape: tuple[int, ...], scale: torch.dtype) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    stored = pair("a.weight", shape, scale)
    wanted = Fp8Dequantize(None)._dequantize_one(*stored.values(), torch.bfloat16)
    with SafetensorsFolder(write(tmp_path, stored)) as reader:
        assert reader.names() == ["a.weight"] and reader.shape("a.weight") == shape
        assert reader.dtype("a.weight") == torch.bfloat16
        assert reader.info("a.weight").nbytes == wanted.nbytes
        assert same(reader.read("a.weight"), wanted) and same(reader.get("a.weight"), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(10, 15), (1, 1), (13, 6), (4, 7), (2, 9, 20), (300, 7001)], ids=str)
def test_blocks_that_are_cut_short_and_every_slice(tmp_path: Path, shape: tuple[int, ...]) -> None:
    stored = pair("a.weight", shape)
    wanted = plain(*stored.values(), BLOCK)
    with SafetensorsFolder(write(tmp_path, stored | {"b": torch.ones(3)})) as reader:
        for first in range(0, shape[0], max(1, shape[0] // 10)):
            for last in (first + 1, shape[0] - 1, None):
                assert same(reader.read("a.weight", first, last), wanted[first:last])
                assert same(reader.get("a.weight", first, last), wanted[first:last])
        assert reader.get("b", 1, 2).tolist() == [1.0] and reader.dtype("b") == torch.float32


@pytest.mark.parametrize("turned", [False, True], ids=["[2I, H]", "[H, 2I]"])
def test_gate_and_up_may_have_blocks_of_their_own(tmp_path: Path, turned: bool) -> None:
    axis = -1 if turned else -2
    halves = [quantise(torch.randn((2, 8, 9) if turned else (2, 9, 8)), BLOCK) for _ in range(2)]
    raw = torch.cat([half.view(torch.uint8) for half, _ in halves], axis).view(torch.float8_e4m3fn)
    factors = torch.cat([half for _, half in halves], axis)
    name = "mlp.experts.gate_up_proj"
    wanted = torch.cat([plain(*half, BLOCK) for half in halves], axis)
    with SafetensorsFolder(write(tmp_path, {name: raw, f"{name}_scale_inv": factors})) as reader:
        assert same(reader.read(name), wanted) and same(reader.read(name, 1, 2), wanted[1:])


@pytest.mark.parametrize(
    "how",
    [
        *({"quant_method": m} for m in ("gptq", "awq", "bitsandbytes", "compressed-tensors", "mxfp4", "mxfp8", "x")),
        {**FP8, "weight_block_size": None},
        {**FP8, "weight_block_size": [128]},
        {**FP8, "weight_block_size": [0, 128]},
        {**FP8, "weight_block_size": "128"},
        {**FP8, "activation_scheme": "static"},
        {**FP8, "scale_fmt": "ue8m0"},
        {**FP8, "quant_method": ["fp8"]},
        {},
        [],
        "fp8",
    ],
    ids=str,
)
@pytest.mark.parametrize("key", ["quantization_config", "compression_config", "nested"])
def test_other_methods_are_refused_by_name(tmp_path: Path, how: Any, key: str) -> None:
    import zoo

    write(tmp_path, pair("a.weight", (4, 6)), None)
    if key == "nested":
        state(tmp_path, {"text_config": {"quantization_config": how}}, "thinker_config")
    else:
        state(tmp_path, how, key)
    method = how.get("quant_method") if isinstance(how, dict) else None
    told = "quantised.*" + (method if isinstance(method, str) else "") + ".*zoo reads block-scaled FP8"
    with pytest.raises(UserError, match=told):
        SafetensorsFolder(tmp_path)
    with pytest.raises(UserError, match=told):
        zoo.convert(tmp_path, tmp_path / "out", allow=["*"], quiet=True)


@pytest.mark.parametrize(
    "name",
    ["a.qweight", "a.qzeros", "a.scales", "a.g_idx", "a.weight_packed", "a.weight_scale", "a.weight.absmax",
     "a.weight.quant_state.bitsandbytes__nf4", "a.SCB", "mlp.experts.down_proj_blocks", "a.input_scale",
     "a.weight_scale_inv", "a.activation_scale"],
)  # fmt: skip
@pytest.mark.parametrize("how", [None, FP8], ids=["nothing said", "fp8 said"])
def test_tensors_of_other_methods_are_refused(tmp_path: Path, name: str, how: Any) -> None:
    write(tmp_path, {name: torch.ones(2, 2)}, how)
    with pytest.raises(UserError, match=f"{name}"):
        SafetensorsFolder(tmp_path)


def test_fp8_without_a_word_in_the_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"quantised and its config\.json has no quantization_config.*a\.weight"):
        SafetensorsFolder(write(tmp_path, pair("a.weight", (4, 6)), None))


def test_what_does_not_fit_is_one_report(tmp_path: Path) -> None:
    stored = pair("a.weight", (4, 6)) | pair("b.weight", (8, 6)) | pair("c.weight", (8, 6)) | pair("d.weight", (8, 6))
    del stored["a.weight_scale_inv"], stored["b.weight"]
    stored["c.weight"] = torch.ones(8, 6)
    stored["d.weight_scale_inv"] = torch.ones(3, 1)
    stored |= {"e.weight": torch.ones(4, 6).to(torch.float8_e5m2), "e.weight_scale_inv": torch.ones(1, 1)}
    stored |= {"f.weight": torch.ones(4).to(torch.float8_e4m3fn), "f.weight_scale_inv": torch.ones(1)}
    stored |= pair("g.weight", (4, 6)) | {"g.weight_scale_inv": torch.ones(1, 1, dtype=torch.int32)}
    with pytest.raises(UserError) as raised:
        SafetensorsFolder(write(tmp_path, stored))
    for told in (
        "a.weight has no weight_scale_inv",
        "b.weight_scale_inv is there without weight",
        "c.weight has a scale_inv",
        r"d.weight_scale_inv is [3, 1], wanted [2, 1]",
        "e.weight has a scale_inv and is [4, 6] of torch.float8_e5m2",
        "f.weight has a scale_inv and is [4]",
        "g.weight_scale_inv is of torch.int32",
    ):
        assert told in str(raised.value)


def test_a_config_that_says_fp8_of_plain_weights(tmp_path: Path) -> None:
    """As a model is that was dequantised by somebody who left the key."""
    with SafetensorsFolder(write(tmp_path, {"a.weight": torch.ones(2)})) as reader:
        assert reader.read("a.weight").tolist() == [1.0, 1.0]


def test_a_config_without_its_statements() -> None:
    arch = {"model_type": "m", "quantization_config": FP8, "talker_config": {"quantization_config": FP8, "n": 1}}
    assert quantisation(arch) == [FP8, FP8]
    assert unquantised(arch) == {"dtype": "bfloat16", "model_type": "m", "talker_config": {"n": 1}}
    assert unquantised({"torch_dtype": "float16", "quantization_config": FP8}) == {"torch_dtype": "float16"}
    assert unquantised({"quantization_config": None}) == {"quantization_config": None}
    assert quantisation(json.loads("[" * 500 + "]" * 500)) == []


def test_what_is_carried_is_plain_too(tiny: Tiny, tmp_path: Path) -> None:
    """The talker of Qwen3-Omni, quantised with the thinker: an export has both in bf16, and transformers loads them."""
    from transformers import Qwen3OmniMoeForConditionalGeneration as Omni

    wanted = write_fp8(tiny.talking, tmp_path / "fp8", (2, 2))
    assert any(name.startswith("talker.") and name + "_scale_inv" in stored_names(tmp_path / "fp8") for name in wanted)
    chunk = fakes.build_chunk(tiny.state, ShardInfo())
    load_hf([chunk], tmp_path / "fp8", BRIDGE, fakes.DIMS)
    export_hf([chunk], tmp_path / "out", BRIDGE, fakes.DIMS, source=tmp_path / "fp8")
    found = {k: v for file in (tmp_path / "out").glob("*.safetensors") for k, v in load_file(file).items()}
    assert found.keys() == wanted.keys() and all(same(found[name], wanted[name]) for name in wanted)
    assert not quantisation(json.loads((tmp_path / "out" / "config.json").read_text()))
    ours, theirs = (Omni.from_pretrained(tmp_path / at, dtype=torch.bfloat16).state_dict() for at in ("out", "fp8"))
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=0)


def stored_names(folder: Path) -> set[str]:
    return set(load_file(folder / "model.safetensors"))
