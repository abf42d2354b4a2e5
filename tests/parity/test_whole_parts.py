"""Parts that are trained whole beside adapters, as peft's modules_to_save: logits, gradients, files.

Every family and variant with towers; bounds are those of test_lora.py.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from support import gathered
from support.adapted import CASES, Adapted, Case, load, recipe_of, with_adapters
from support.engine import packed_batch, padded_batch
from support.pairs import worst
from support.tiny import load_plain
from support.weights import tensors

from zoo.checkpoint import lora_files
from zoo.checkpoint.export import export
from zoo.errors import UserError
from zoo.model import build
from zoo.registry import get_family

pytestmark = pytest.mark.sampled(9)

LOGITS, GRADIENTS = 4e-5, 2e-5


def whole_parts(case: Case) -> Case:
    """Adapters of the language model, and all other parts trained whole."""
    family = get_family(case.family.name)
    others = [part for part in family.parts if part != "language"]
    return replace(case, parts="language", whole=",".join(others))


WHOLE = {name: whole_parts(case) for name, case in CASES.items() if "," in case.parts}
WHOLE["the merger, adapters in its tower"] = replace(CASES["qwen3_vl"], whole="merger")
WHOLE["the tower, adapters in its merger"] = replace(CASES["qwen25_vl"], parts="merger,language", whole="vision")


@pytest.fixture(scope="module", params=WHOLE)
def adapted(request: pytest.FixtureRequest, cpu_world: Any, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    case = WHOLE[request.param]
    folder = case.family.write(tmp_path_factory.mktemp("checkpoint") / "hf")
    return load(case, folder, cpu_world, tmp_path_factory.mktemp("adapter") / "export")


def test_peft_gives_the_same_logits(adapted: Adapted) -> None:
    wanted = adapted.logits()
    with adapted.peft.disable_adapter():
        plain = adapted.logits()
    assert worst(plain, wanted) > 1, "the adapters matter"
    assert worst(adapted.zoo.logits(packed_batch(adapted.samples)), wanted) < LOGITS
    padded = adapted.zoo.logits(padded_batch(adapted.samples, "mixed"), mode="none")
    assert worst(padded, wanted) < LOGITS


def test_peft_gives_the_same_gradients(adapted: Adapted) -> None:
    wanted_loss, wanted = adapted.wanted()
    adapted.peft.zero_grad(set_to_none=True)
    loss, found = adapted.found([packed_batch(adapted.samples)])
    assert loss == pytest.approx(wanted_loss, rel=1e-6)
    assert any(".lora_" not in name for name in found)
    error, name = gathered.worst(found, {name: wanted[name] for name in found})
    assert error < GRADIENTS, name
    assert not {name for name in wanted.keys() - found.keys() if wanted[name] is not None and wanted[name].any()}


def test_the_folder_says_what_is_whole(adapted: Adapted) -> None:
    """peft wraps the modules of the parts and no other; each tensor of the file is used, and is there again when peft saves."""
    config = json.loads((adapted.exported / "adapter_config.json").read_text())
    file = load_file(adapted.exported / "adapter_model.safetensors")
    assert set(config["modules_to_save"]) == set(adapted.adapters.whole.modules)
    assert set(config["modules_to_save"]) <= dict(adapted.peft.get_base_model().named_modules()).keys()
    whole = {name for name in file if ".lora_" not in name}
    assert whole == adapted.adapters.whole.names
    loaded = peft.get_peft_model_state_dict(adapted.peft)
    assert loaded.keys() == file.keys()
    for name, tensor in file.items():
        torch.testing.assert_close(loaded[name], tensor, rtol=0, atol=0)
    assert all(name.startswith("projector.image_newline") for name in adapted.adapters.whole.kept_frozen)


def test_a_folder_is_gone_on_with_and_merged(adapted: Adapted, cpu_world: Any, tmp_path: Path) -> None:
    """lora.init of what peft has saved, then the merged weights: in transformers, without peft, the same logits."""
    adapted.peft.save_pretrained(tmp_path / "by_peft")
    recipe = adapted.zoo.recipe
    recipe = replace(recipe, lora=replace(recipe.lora, init=str(tmp_path / "by_peft")))
    zoo, adapters = with_adapters(recipe, cpu_world)
    with torch.no_grad():
        for parameter in adapters.named().values():
            parameter.fill_(9.0)
    lora_files.start(adapters, recipe)
    for name, parameter in adapters.named().items():
        torch.testing.assert_close(
            parameter, adapted.adapters.named()[name], rtol=0, atol=0, msg=f"{name}: {{}}".format
        )
    adapters.merge()
    adapters.freeze_others()
    merged = export([zoo.model], tmp_path / "merged", zoo.assembly, cpu_world, zoo.assembly.source)
    wanted = adapted.logits()
    assert worst(zoo.logits(packed_batch(adapted.samples)), wanted) < 4 * LOGITS
    whole = load_plain(merged)
    plain = getattr(whole, "thinker", whole)
    with torch.no_grad():
        found = [plain(**example.features).logits[0] for example in adapted.examples.values()]
    assert worst(found, wanted) < 4 * LOGITS
    before, after = tensors(adapted.folder), tensors(merged)
    if before.keys() == after.keys():  # a thinker by itself is exported as a whole model
        same = {name for name in before if torch.equal(before[name], after[name])}
        entries = [one.target.entry for one in adapters.held]
        entries += [one.entry for one, parameter in adapters.whole.saved if parameter.requires_grad]
        experts = adapters.dims.experts
        changed = {name for one in entries for name in one.layout.all_names(one.binding, experts)}
        assert same == before.keys() - changed


def test_without_adapters_the_first_weights_are_there(adapted: Adapted, cpu_world: Any) -> None:
    recipe = adapted.zoo.recipe
    assembly = build.assemble(recipe)
    chunks = build.build_model(assembly, recipe, cpu_world)
    _, adapters = lora_files.adapt(chunks, assembly, recipe, cpu_world, originals=True)
    with torch.no_grad():
        for name, parameter in adapters.named().items():
            parameter.copy_(adapted.adapters.named()[name])
    zoo = replace(adapted.zoo, model=chunks[0].train())
    batch = packed_batch(adapted.samples)
    with adapted.peft.disable_adapter():
        wanted = adapted.logits()
    with adapters.off():
        assert worst(zoo.logits(batch), wanted) < LOGITS
    assert worst(zoo.logits(batch), adapted.logits()) < LOGITS


def test_folders_of_other_parts(cpu_world: Any, tmp_path: Path) -> None:
    """One without the part leaves it as it is; one with more, or with other parts, is refused."""
    case = replace(CASES["qwen3_vl"], parts="language", whole="merger")
    folder = case.family.write(tmp_path / "hf")
    adapted = load(case, folder, cpu_world, tmp_path / "export")

    def go_on(whole: str, init: Path) -> Any:
        recipe = recipe_of(replace(case, whole=whole), folder)
        recipe = replace(recipe, lora=replace(recipe.lora, init=str(init)))
        _, adapters = with_adapters(recipe, cpu_world)
        before = {name: one.detach().clone() for name, one in adapters.whole.trained.items()}
        lora_files.start(adapters, recipe)
        return before, adapters

    with pytest.raises(UserError, match=r"modules_to_save is \['model.visual.*name the part .* lora.whole_parts"):
        go_on("", adapted.exported)
    with pytest.raises(UserError, match=r"visual.blocks.0.norm1.bias: missing"):
        go_on("vision", adapted.exported)
    none = load(replace(case, whole=""), folder, cpu_world, tmp_path / "none")
    before, adapters = go_on("merger", none.exported)
    assert before
    for name, one in before.items():
        torch.testing.assert_close(adapters.whole.trained[name], one, rtol=0, atol=0)
