"""Checkpoints between Hugging Face and zoo: bit for bit there and back, whole or refused, and of the same logits.

One process converts; scores are computed under several parallel layouts. Log-probabilities in fp32 by different code
agree to 5e-5 (measured: 1.5e-5).
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import rank_tasks
from support.families import FAMILIES
from support.pool import Pool, PoolError
from support.tiny import thinker_names
from support.tiny_omni import write_tiny_omni
from support.tiny_qwen3_vl import write_tiny_qwen3_vl
from support.tiny_qwen25_omni import load_thinker, write_tiny_qwen25_omni
from support.weights import same, tensors

pytestmark = pytest.mark.slow

LOGPROBS = 5e-5
LAYERS = {"num_hidden_layers": 4}
MIXED = LAYERS | {"layer_types": ["sliding_attention", "full_attention"] * 2}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {  # families of support.families and sizes
    "qwen3_vl": ("qwen3_vl", {"tied": True, **LAYERS}),
    "qwen3_vl experts": ("qwen3_vl experts", LAYERS),
    "gemma3": ("gemma3", {"tied": True, **MIXED}),
    "gemma3_text": ("gemma3_text", {"tied": True}),
    "gemma4": ("gemma4", {"tied": True, **MIXED}),
    "qwen25_vl": ("qwen25_vl", LAYERS),
    "qwen3_asr": ("qwen3_asr", {"tied": True, **LAYERS}),
    "qwen25_omni": ("qwen25_omni", {"whole": True, **LAYERS}),
    "glm45v": ("glm45v", LAYERS),
    "qwen35": ("qwen35_vl", {"tied": True}),
    "qwen35 experts and MTP": ("qwen35_vl experts", {"mtp": 1}),
    "qwen3 experts": ("qwen3 experts", LAYERS),
    "qwen3_next": ("qwen3_next", {"mtp": 1}),
    "qwen35_text experts and MTP": ("qwen35_text experts", {"mtp": 1}),
    "omni": ("whole omni", {}),
    "llava": ("llava_next", {}),
    "internvl experts": ("internvl experts", {"text": LAYERS}),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    done: dict[str, Path] = {}

    def write(name: str) -> Path:
        if name not in done:
            family, sizes = CHECKPOINTS[name]
            folder = tmp_path_factory.mktemp("checkpoint")
            done[name] = write_tiny_omni(folder).whole if name == "omni" else FAMILIES[family].write(folder, **sizes)
        return done[name]

    return write


def published(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json as on the hub, of what transformers saves: it renames the number of Qwen3's experts."""
    text = config.get("text_config", config)
    if "num_local_experts" in text:
        text["num_experts"] = text.pop("num_local_experts")
    return config


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_there_and_back(name: str, checkpoint: Callable[[str], Path], call: Callable[..., Any], tmp_path: Path) -> None:
    import transformers

    source = checkpoint(name)
    call("convert", source, tmp_path / "zoo", quiet=True)
    call("convert", tmp_path / "zoo", tmp_path / "hf", quiet=True, max_shard_size=200_000)
    same(tensors(tmp_path / "hf"), tensors(source))
    assert (tmp_path / "hf" / "model.safetensors.index.json").is_file()
    files = {path.name for path in source.iterdir() if path.suffix != ".safetensors"}
    assert files <= {path.name for path in (tmp_path / "hf").iterdir()}
    card = (tmp_path / "hf" / "README.md").read_text()
    assert card.startswith("---\n") and "from_pretrained" in card and (tmp_path / "zoo" / "README.md").is_file()
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config == published(json.loads((source / "config.json").read_text()))
    kind, *_ = config["architectures"]  # of several, transformers builds the first
    _, report = getattr(transformers, kind).from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"]
    text = name.startswith(("gemma3_text", "qwen3 experts", "qwen3_next", "qwen35_text"))
    made = transformers.AutoProcessor.from_pretrained(tmp_path / "hf")
    assert ("Tokenizer" if text else "Processor") in type(made).__name__
    found = call("verify", source, tmp_path / "zoo", rows="digits:heldout", overrides=("packing.budget=2048",))
    assert found["equal"] and set(found["counts"]) == {"equal"}
    compared = [row["max_difference"] for row in found["rows"] if row["skipped"] is None]
    assert len(compared) > (10 if text else 70) and max(compared) < LOGPROBS
    assert (len(compared) < len(found["rows"])) == (name == "omni")  # clips of several lengths in a row


SCORED = {
    "packed": (1, ()),
    "side by side": (1, ("packing.mode=none", "train.micro_batch=4")),
    "dp2": (2, ()),
    "tp2": (2, ("parallel.tp=2",)),
    "pp2": (2, ("parallel.pp=2",)),
    "pp2 vpp2": (2, ("parallel.pp=2", "parallel.vpp=2")),
    "cp2": (2, ("parallel.cp=2",)),
    "ep2": (2, ("parallel.ep=2",)),
    "tp2 pp2": (4, ("parallel.tp=2", "parallel.pp=2")),
}


@pytest.fixture(scope="module")
def scored() -> dict[str, Any]:
    return {}


@pytest.mark.parametrize("layout", SCORED)
def test_scores_do_not_depend_on_the_layout(
    layout: str, checkpoint: Callable[[str], Path], call: Callable[..., Any], scored: dict[str, Any], tmp_path: Path
) -> None:
    ranks, overrides = SCORED[layout]
    source = checkpoint("qwen3_vl experts")
    rows = call("score", source, "digits:heldout", overrides, ranks=ranks)
    wanted = scored.setdefault("rows", rows)
    assert [row["source"] for row in rows] == [row["source"] for row in wanted] and len(rows) == 125
    for row, want in zip(rows, wanted, strict=True):
        assert row["token_ids"] == want["token_ids"] and row["labels"] == want["labels"]
        assert len(row["token_ids"]) == len(row["labels"]) == len(row["logprobs"])
        given = [
            (a, b)
            for a, b, label in zip(row["logprobs"], want["logprobs"], row["labels"], strict=True)
            if label != -100
        ]
        assert given and max(abs(a - b) for a, b in given) < LOGPROBS and max(a for a, _ in given) < 0
        others = [value for value, label in zip(row["logprobs"], row["labels"], strict=True) if label == -100]
        assert set(others) == {0.0}


def test_rows_given_as_dicts(checkpoint: Callable[[str], Path], call: Callable[..., Any]) -> None:
    turns = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    (row,) = call("score", checkpoint("qwen3_vl"), [{"messages": turns}])
    assert sum(label != -100 for label in row["labels"]) == 2  # the digit and the end of turn


def test_a_run_starts_from_converted_weights_and_is_converted_itself(
    call: Callable[..., Any], checkpoint: Callable[[str], Path], pool: Pool, tmp_path: Path
) -> None:
    """Carried tensors and frozen parts come out byte for byte; another run starts from the first one's checkpoint."""
    source = checkpoint("qwen35 experts and MTP")
    call("convert", source, tmp_path / "zoo", quiet=True)
    run = tmp_path / "run"
    overrides = [
        *rank_tasks.ADAMW, f"model.init={tmp_path / 'zoo'}", "model.freeze=vision", "train.steps=1", "train.global_batch=2", "train.eval_rows=2",
        "packing.budget=512", "data.lookahead=4", "data.augment=0", "train.lr=1e-2", "train.warmup_steps=0", f"run.dir={run}", "train.mtp_loss=0",
    ]  # fmt: skip
    pool.run(2, rank_tasks.train, [*overrides, "parallel.pp=2"], "qwen35_vl_moe_sft", "tiny-moe", timeout=300.0)
    before, after = tensors(source), tensors(run / "export")
    assert before.keys() == after.keys()
    moved = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert moved and not any(name.startswith(("mtp.", "model.visual.")) for name in moved)
    call("convert", run, tmp_path / "again", quiet=True)
    same(tensors(tmp_path / "again"), after)
    found = call("verify", run / "checkpoints" / "iter_1", source)
    assert not found["equal"] and found["counts"]["differs"] and "missing in A" not in found["counts"]
    further = tmp_path / "further"
    overrides += [f"model.init={run}", f"run.dir={further}", "train.lr=1e-30", "train.min_lr=0", "parallel.tp=2"]
    pool.run(2, rank_tasks.train, overrides, "qwen35_vl_moe_sft", "tiny-moe", timeout=300.0)
    same(tensors(further / "export"), after)


def test_damaged_weights_of_zoos_own_are_named_before_they_are_read(
    call: Callable[..., Any], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    call("convert", checkpoint("llava"), tmp_path / "zoo", quiet=True)
    (file,) = (tmp_path / "zoo" / "weights").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    message = r"CheckpointError: .*weights/model\.safetensors is damaged: its checksum"
    with pytest.raises(PoolError, match=message):
        call("convert", tmp_path / "zoo", tmp_path / "hf", quiet=True)
    with pytest.raises(PoolError, match=message):
        call("verify", tmp_path / "zoo", checkpoint("llava"))
    with pytest.raises(PoolError, match=message):
        call("score", tmp_path / "zoo", "digits:heldout", ranks=2)
    assert not (tmp_path / "hf").exists()


def spoilt(source: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    shutil.copytree(source, folder)
    found = tensors(folder)
    change(found)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, folder / "model.safetensors")
    return folder


NORM, UP = "model.language_model.norm.weight", "model.language_model.layers.0.mlp.up_proj.weight"


def test_what_does_not_fit_is_one_report_and_nothing_is_written(
    checkpoint: Callable[[str], Path], call: Callable[..., Any], tmp_path: Path
) -> None:
    def change(found: dict[str, torch.Tensor]) -> None:
        del found[NORM]
        found["model.extra.weight"] = torch.ones(2)
        found["model.language_model.layers.77.mlp.up_proj.weight"] = torch.ones(2)

    bad = spoilt(checkpoint("qwen3_vl"), tmp_path / "bad", change)
    with pytest.raises(PoolError) as caught:
        call("convert", bad, tmp_path / "out", quiet=True)
    message = str(caught.value)
    for words in (
        "3 problem(s)", f"{NORM}: missing", "model.extra.weight: unmapped", "layers.77.mlp.up_proj.weight: extra",
    ):  # fmt: skip
        assert words in message
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]
    allow = ("model.extra.*", NORM, "*.layers.77.*")
    call("convert", bad, tmp_path / "out", quiet=True, allow=allow)
    about = json.loads((tmp_path / "out" / "zoo.json").read_text())
    assert about["allow"] == list(allow) and len(about["allowed"]) == 3
    with pytest.raises(PoolError, match=r"decoder.final_layernorm.weight: missing"):
        call("convert", tmp_path / "out", tmp_path / "back", quiet=True)
    call("convert", tmp_path / "out", tmp_path / "back", quiet=True, allow=("decoder.final_layernorm.*",))
    assert tensors(checkpoint("qwen3_vl")).keys() - tensors(tmp_path / "back").keys() == {NORM}
    assert len(json.loads((tmp_path / "back" / "zoo_conversion.json").read_text())["allowed"]) == 4


def test_a_wrong_shape_is_refused(checkpoint: Callable[[str], Path], call: Callable[..., Any], tmp_path: Path) -> None:
    def change(found: dict[str, torch.Tensor]) -> None:
        found[UP] = found[UP][:-1]

    bad = spoilt(checkpoint("qwen3_vl"), tmp_path / "bad", change)
    with pytest.raises(PoolError, match=rf"{UP}: shape \["):
        call("convert", bad, tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()


def test_verify_finds_what_differs(checkpoint: Callable[[str], Path], call: Callable[..., Any], tmp_path: Path) -> None:
    source = checkpoint("qwen3_vl experts")
    experts = "model.language_model.layers.1.mlp.experts.down_proj"

    def change(found: dict[str, torch.Tensor]) -> None:
        found[experts][2, 0, 0] += 0.5
        del found[NORM]
        found["model.visual.new.weight"] = torch.ones(1)

    other = spoilt(source, tmp_path / "other", change)
    found = call("verify", source, other)
    assert not found["equal"]
    wrong = {tensor["name"]: tensor for tensor in found["tensors"] if tensor["status"] != "equal"}
    assert wrong.keys() == {
        "decoder.layers.1.mlp.experts.weight2", "decoder.final_layernorm.weight", "model.visual.new.weight",
    }  # fmt: skip
    assert wrong["decoder.layers.1.mlp.experts.weight2"]["max_difference"] == pytest.approx(0.5)
    assert wrong["decoder.final_layernorm.weight"]["status"] == "missing in B"
    assert wrong["model.visual.new.weight"]["status"] == "missing in A"


def test_two_layouts_of_the_same_weights_are_equal(call: Callable[..., Any], tmp_path: Path) -> None:
    hub = write_tiny_qwen3_vl(tmp_path / "hub", moe=True)
    memory = write_tiny_qwen3_vl(tmp_path / "memory", moe=True, published=False)
    assert call("verify", hub, memory)["equal"]


def test_a_cast_is_written_and_said(
    checkpoint: Callable[[str], Path], call: Callable[..., Any], tmp_path: Path
) -> None:
    def add_talker(found: dict[str, torch.Tensor]) -> None:
        found["talker.model.norm.weight"] = torch.rand(5, dtype=torch.float64)
        found["code2wav.codes"] = torch.randint(0, 100, (3, 2), dtype=torch.int8)

    source = spoilt(checkpoint("omni"), tmp_path / "talking", add_talker)
    call("convert", source, tmp_path / "zoo", quiet=True, dtype=torch.bfloat16)
    call("convert", tmp_path / "zoo", tmp_path / "hf", quiet=True)
    before, after = tensors(source), tensors(tmp_path / "hf")
    for name, tensor in before.items():
        carried = name.startswith(("talker.", "code2wav."))
        torch.testing.assert_close(
            after[name], tensor if carried else tensor.bfloat16(), rtol=0, atol=0, msg=f"{name}: {{}}".format
        )
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


def test_what_speaks_is_carried_through_with_its_file_of_speakers(call: Callable[..., Any], tmp_path: Path) -> None:
    """transformers' class of the whole model loads from that file what it has no tensors for; zoo does not open it."""

    def add_talker(found: dict[str, torch.Tensor]) -> None:
        found["talker.model.norm.weight"] = torch.rand(5, dtype=torch.bfloat16)
        found["token2wav.code2wav_bigvgan_model.conv_pre.bias"] = torch.rand(3)

    written = write_tiny_qwen25_omni(tmp_path / "silent", whole=True, **LAYERS)
    source = spoilt(written, tmp_path / "talking", add_talker)
    (source / "spk_dict.pt").write_bytes(b"not a pickle")
    call("convert", source, tmp_path / "zoo", quiet=True)
    call("convert", tmp_path / "zoo", tmp_path / "hf", quiet=True)
    same(tensors(tmp_path / "hf"), tensors(source))
    assert (tmp_path / "hf" / "spk_dict.pt").read_bytes() == b"not a pickle"
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["enable_audio_output"] and config["architectures"] == ["Qwen2_5OmniForConditionalGeneration"]
    model = load_thinker(tmp_path / "hf")
    wanted = tensors(written)
    for name, x in thinker_names(model.state_dict()).items():
        torch.testing.assert_close(x, wanted[f"thinker.{name}"], rtol=0, atol=0)


def test_killed_at_any_moment_it_leaves_nothing_that_loads_or_the_whole(tmp_path: Path) -> None:
    """50 kills; in every other one there is a former result, which stays until the new one is whole."""
    wide = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 4_000}
    source = write_tiny_qwen3_vl(tmp_path / "source", **wide)
    (tmp_path / "out").mkdir()
    script = Path(rank_tasks.__file__).with_name("kill_convert.py")
    command = [sys.executable, str(script), str(source), str(tmp_path / "out" / "zoo"), "50"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    left = json.loads(done.stdout.splitlines()[-1])
    assert sum(left.values()) == 50, left
    assert left.get("killed, nothing") and left.get("killed, whole"), left


PUBLISHED = {  # recipe, size: parameters and tensors of the published file, less those that zoo carries through
    ("qwen3_vl_sft", "2b"): (2_127_532_032, 625),
    ("qwen3_vl_sft", "4b"): (4_437_815_808, 713),
    ("qwen3_vl_sft", "8b"): (8_767_123_696, 750),
    ("qwen3_vl_sft", "32b"): (33_357_390_064, 1058),
    ("qwen3_vl_moe_sft", "30b-a3b"): (31_070_754_032, 882),
    ("qwen3_vl_moe_sft", "235b-a22b"): (235_670_022_896, 1388),
    ("qwen25_vl_sft", "3b"): (3_754_622_976, 824),
    ("qwen25_vl_sft", "7b"): (8_292_166_656, 729),
    ("qwen25_vl_sft", "32b"): (33_452_718_336, 1161),
    ("qwen25_vl_sft", "72b"): (73_410_777_344, 1353),
    ("qwen3_asr_sft", "0.6b"): (782_426_112, 611),
    ("qwen3_asr_sft", "1.7b"): (2_038_052_480, 707),
    ("qwen25_omni_sft", "3b"): (4_703_464_448, 1442),
    ("qwen25_omni_sft", "7b"): (8_931_813_888, 1346),
    ("gemma3_sft", "4b"): (4_300_079_472, 883),
    ("gemma3_sft", "12b"): (12_187_325_040, 1065),
    ("gemma3_sft", "27b"): (27_432_406_640, 1247),
    ("gemma4_sft", "31b"): (31_273_088_876, 1188),
    ("glm45v_sft", "4.5-106b-a12b"): (107_710_933_120, 18_106),
    ("glm45v_sft", "4.6-106b-a12b"): (107_710_933_120, 18_106),
    ("qwen35_vl_sft", "0.8b"): (873_438_784, 488),
    ("qwen35_vl_sft", "2b"): (2_274_069_824, 632),
    ("qwen35_vl_sft", "4b"): (4_659_865_088, 738),
    ("qwen35_vl_sft", "9b"): (9_653_104_368, 775),
    ("qwen35_vl_sft", "27b"): (27_781_427_952, 1199),
    ("qwen35_vl_moe_sft", "35b-a3b"): (35_951_822_704, 1811),
    ("qwen35_vl_moe_sft", "122b-a10b"): (125_086_497_008, 1949),
    ("qwen35_vl_moe_sft", "397b-a17b"): (403_397_928_944, 2924),
    ("qwen3_omni_sft", "30b-a3b"): (31_719_205_488, 0),
    ("llava_sft", "1.5-7b"): (7_063_427_072, 686),
    ("llava_sft", "1.5-13b"): (13_351_494_656, 758),
    ("llava_sft", "1.6-mistral-7b"): (7_566_747_648, 687),
    ("llava_onevision_sft", "onevision-0.5b"): (893_675_552, 716),
    ("llava_onevision_sft", "onevision-7b"): (8_030_807_584, 765),
    ("internvl_sft", "1b"): (1_060_897_792, 753),
    ("internvl_sft", "2b"): (2_348_347_392, 753),
    ("internvl_sft", "4b"): (4_732_489_216, 841),
    ("internvl_sft", "8b"): (8_528_318_464, 841),
    ("internvl_sft", "14b"): (15_119_523_840, 885),
    ("internvl_sft", "38b"): (38_390_405_504, 1392),
    ("internvl_sft", "30b-a3b"): (30_848_730_112, 19309),
    ("internvl_sft", "241b-a28b"): (240_699_370_368, 37630),
}


@pytest.mark.parametrize(("recipe", "size"), PUBLISHED)
def test_published_checkpoints_from_names_and_shapes(recipe: str, size: str, pool: Pool) -> None:
    """zoo's own model of each published size, without data: all its parameters become the published tensors, and back."""
    parameters, tensors = PUBLISHED[recipe, size]
    found, shapes = pool.run(1, rank_tasks.meta_model_sizes, recipe, size, timeout=300.0)[0]
    assert found == parameters
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == parameters
    assert not tensors or len(shapes) == tensors
