"""Every name of published indexes, from Hugging Face to zoo and back: none is left over and none is missing.

`zoo.convert` plans both ways on headers alone: files of the right names and shapes that hold no data.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from support.artefacts import artefact, index_names, write_headers

import zoo
from zoo.bridge.files.record import write_record
from zoo.bridge.files.writer import ExportWriter
from zoo.bridge.native import PASS_THROUGH
from zoo.config.compose import load_recipe
from zoo.config.locate import read_arch
from zoo.errors import UserError
from zoo.model.meta_model import build_meta_model
from zoo.tools import convert

pytestmark = pytest.mark.slow

type Shapes = dict[str, tuple[int, ...]]


@pytest.fixture
def headers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversions write headers of the tensors that they plan, and no data."""

    def write(conversion: convert.Conversion, writer: ExportWriter, *_: object) -> None:
        planned = [tensor for job in conversion.jobs for tensor in job.planned]
        writer.begin()
        (writer.partial / conversion.part).mkdir(exist_ok=True)
        shapes, dtypes = ({tensor.name: getattr(tensor, key) for tensor in planned} for key in ("shape", "dtype"))
        write_headers(writer.partial / conversion.part / "model.safetensors", shapes, dtypes)
        conversion.write_side_files(writer.partial)
        write_record(
            writer.partial, {"weights/model.safetensors": "0" * 32}
        )  # held against the data when these are read
        writer.partial.rename(writer.target)

    monkeypatch.setattr(convert, "_write", write)


def shapes_in_transformers(folder: Path, kind: str) -> Shapes:
    """Published names and shapes of a config, as transformers' own model has them."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = getattr(transformers, kind)(config)
    tensors: Mapping[str, torch.Tensor] = dict(model.named_parameters())
    tensors |= {name: buffer for name, buffer in model.state_dict().items() if name not in tensors}
    return {name: tuple(tensor.shape) for name, tensor in tiny.experts_apart(tensors).items()}


def shapes_of(folder: Path) -> Shapes:
    with zoo.bridge.SafetensorsFolder(folder) as reader:
        return {name: reader.shape(name) for name in reader.names()}


def as_published(published: Path, shapes: Shapes, folder: Path) -> Path:
    """A checkpoint's folder with its config and headers of its weights."""
    folder.mkdir()
    (folder / "config.json").write_bytes((published / "config.json").read_bytes())
    write_headers(folder / "model.safetensors", shapes, dict.fromkeys(shapes, torch.bfloat16))
    return folder


def test_every_tensor_of_an_omni_model_there_and_back(tmp_path: Path, headers_only: None) -> None:
    published = artefact("qwen3-omni-30b-a3b")
    names = set(index_names(published))
    shapes = shapes_in_transformers(published, "Qwen3OmniMoeForConditionalGeneration")
    assert len(names) == 28_010 and shapes.keys() == names
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 35_259_818_545  # as its index says
    source = as_published(published, shapes, tmp_path / "hf")
    native = zoo.convert(source, tmp_path / "zoo", quiet=True)
    carried = {
        name.removeprefix(PASS_THROUGH) for name in shapes_of(native / "weights") if name.startswith(PASS_THROUGH)
    }
    assert carried == {name for name in names if name.startswith("code2wav.")} and len(carried) == 230
    talker = [name for name in names if name.startswith("talker.")]
    mapped = [name for name in shapes_of(native / "weights") if name.startswith("talker.")]
    assert len(talker) == 8_037 and len(mapped) == 20 * 12 + 5 * 8 + 12 + 2 * 15
    assert shapes_of(zoo.convert(native, tmp_path / "back", quiet=True)) == shapes


def test_an_embedding_model_has_no_head(tmp_path: Path, headers_only: None) -> None:
    published = artefact("qwen3-vl-embedding-8b")
    names = set(index_names(published))
    shapes = shapes_in_transformers(published, "Qwen3VLForConditionalGeneration")
    head = shapes.pop("lm_head.weight")
    assert len(names) == 749 and shapes.keys() == names and head == shapes["model.language_model.embed_tokens.weight"]
    native = zoo.convert(as_published(published, shapes, tmp_path / "hf"), tmp_path / "zoo", quiet=True)
    assert shapes_of(zoo.convert(native, tmp_path / "back", quiet=True)) == shapes


def test_an_embedding_model_of_text_has_names_without_a_prefix(tmp_path: Path, headers_only: None) -> None:
    """Qwen3-Embedding-8B, as its base class saves it: Qwen3-8B without a head, and a smaller vocabulary."""
    published, sizes = tmp_path / "published", load_recipe("qwen3_sft", ["size=8b"]).model.arch
    published.mkdir()
    arch = {**sizes, "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151_665}
    (published / "config.json").write_text(json.dumps(arch))
    shapes = shapes_in_transformers(published, "Qwen3Model")
    assert len(shapes) == 398 and "embed_tokens.weight" in shapes
    native = zoo.convert(as_published(published, shapes, tmp_path / "hf"), tmp_path / "zoo", quiet=True)
    back = shapes_of(zoo.convert(native, tmp_path / "back", quiet=True))
    assert back == {f"model.{name}": shape for name, shape in shapes.items()}


def test_every_tensor_of_a_decoder_alone(tmp_path: Path, headers_only: None) -> None:
    """180 experts a layer, one by one, under the names that they had in the whole model; its config names MTP, its weights have none."""
    published = artefact("qwen3.5-25b-reap-text")
    whole, alone = "model.language_model.", "model."
    shapes = shapes_in_transformers(published, "Qwen3_5MoeForCausalLM")
    names = {name.replace(whole, alone) for name in index_names(published)}
    assert len(names) == len(index_names(published)) == 22_213 and shapes.keys() == names
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 25_091_371_648  # as its index says
    sizes = load_recipe("qwen35_text_moe_sft", ["size=25b-a3b"]).model.arch
    same = {key: value for key, value in read_arch(published).items() if key in sizes and key != "architectures"}
    assert len(same) > 30 and same | {"dtype": "bfloat16"} == {key: sizes[key] for key in same}
    source = {name.replace(alone, whole): shape for name, shape in shapes.items()}
    assert source.keys() == set(index_names(published))
    native = zoo.convert(as_published(published, source, tmp_path / "hf"), tmp_path / "zoo", quiet=True)
    assert shapes_of(zoo.convert(native, tmp_path / "back", quiet=True)) == shapes


def test_what_zoo_has_not_is_refused_by_its_config() -> None:
    published = artefact("qwen2.5-vl-logics")
    arch: dict[str, Any] = read_arch(published)
    with pytest.raises(UserError, match="no family has it"):
        build_meta_model(arch, index_names(published))
