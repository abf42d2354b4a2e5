"""Adapters as peft has them: loaded by peft onto transformers' model they give zoo's logits, loss and gradients.

Every family and variant, adapters with a random B on every linear of every part and on all experts, fp32; and parts that are
trained whole beside adapters, as peft's modules_to_save. The two sum in different orders. Measured: 3e-5 of logits up to 8 (the hybrids', whose states add up rounding; others 9e-6), 7e-6 of gradients,
relative to the Euclidean norm of each tensor.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import gathered
from support.adapted import CASES, EXPERTS, WHOLE, Adapted, load, recipe_of, with_adapters
from support.adapters import adapt
from support.engine import packed_batch, padded_batch
from support.pairs import relative_errors, worst
from support.tiny import load_plain
from support.weights import tensors
from torch import Tensor

from zoo.checkpoint import lora_files
from zoo.checkpoint.export import export
from zoo.errors import UserError
from zoo.model import build
from zoo.model.lora import seed_dropout

LOGITS, GRADIENTS = 4e-5, 2e-5
# A part of a fused weight, of the experts, by regular expressions.
FEW = {
    "queries and values": ("qwen3_vl", ("q_proj", "v_proj")),
    "keys and up": ("qwen3_vl", ("self_attn.k_proj", r".*layers\.[13]\.mlp\.up_proj")),
    "gated queries, linear attention": ("qwen35_vl", ("q_proj", "in_proj_z", "in_proj_a", "out_proj")),
    "first weights of experts": ("qwen3_vl experts", ("experts.gate_up_proj",)),
    "second weights of experts": ("qwen3_omni", ("experts.down_proj", "down_proj")),
    "experts and shared expert": ("qwen35_vl experts", (*EXPERTS, "shared_expert.gate_proj")),
}


BOTH = CASES | WHOLE


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    done: dict[str, Path] = {}

    def write(name: str) -> Path:
        if name not in done:
            done[name] = BOTH[name].family.write(tmp_path_factory.mktemp("checkpoint") / "hf")
        return done[name]

    return write


@pytest.fixture(scope="module", params=BOTH)
def adapted(
    request: pytest.FixtureRequest,
    checkpoint: Callable[[str], Path],
    cpu_world: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Adapted:
    folder = checkpoint(request.param)
    return load(BOTH[request.param], folder, cpu_world, tmp_path_factory.mktemp("adapter") / "export")


def assert_same(adapted: Adapted, batches: list[Any], **packing: Any) -> None:
    loss, gradients = adapted.found(batches, **packing)
    wanted_loss, wanted = adapted.wanted()
    adapted.peft.zero_grad(set_to_none=True)
    assert loss == pytest.approx(wanted_loss, rel=1e-6)
    assert any(".lora_" not in name for name in gradients) == bool(adapted.adapters.whole.trained)
    same = {name: wanted[name] for name in gradients}
    if adapted.adapters.whole.trained:  # keys' biases of towers are trained, too
        assert gathered.worst(gradients, same)[0] < GRADIENTS
    else:
        assert not {name: error for name, error in relative_errors(gradients, same).items() if not error < GRADIENTS}
    assert not {name for name in wanted.keys() - gradients.keys() if wanted[name] is not None and wanted[name].any()}


@pytest.mark.sampled(16)
def test_peft_gives_the_same_logits(adapted: Adapted) -> None:
    wanted = adapted.logits()
    with adapted.peft.disable_adapter():
        moved = worst(adapted.logits(), wanted)
    assert moved > 1, "the adapters matter"
    assert worst(adapted.zoo.logits(packed_batch(adapted.samples)), wanted) < LOGITS
    padded = adapted.zoo.logits(padded_batch(adapted.samples, "mixed"), mode="none")
    assert worst(padded, wanted) < LOGITS


@pytest.mark.sampled(16)
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_peft_gives_the_same_gradients(layout: str, adapted: Adapted) -> None:
    if layout == "packed":
        assert_same(adapted, [packed_batch(adapted.samples)])
    else:
        assert_same(adapted, [padded_batch(adapted.samples, "mixed")], mode="none")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("few", FEW)
def test_a_part_of_the_linears(few: str, checkpoint: Callable[[str], Path], cpu_world: Any, tmp_path: Path) -> None:
    name, targets = FEW[few]
    case = replace(CASES[name], targets=targets, parts="language")
    adapted = load(case, checkpoint(name), cpu_world, tmp_path / "export")
    assert worst(adapted.zoo.logits(packed_batch(adapted.samples)), adapted.logits()) < LOGITS
    assert_same(adapted, [packed_batch(adapted.samples)])


@pytest.mark.sampled(16)
def test_an_adapter_is_gone_on_with_and_merged(adapted: Adapted, cpu_world: Any, tmp_path: Path) -> None:
    """lora.init of what peft has saved, then the merged weights: in transformers, without peft, the same logits; what has no adapter is untouched."""
    adapted.peft.save_pretrained(tmp_path / "by_peft")
    init = str(tmp_path / "by_peft")
    recipe = replace(adapted.zoo.recipe, lora=replace(adapted.zoo.recipe.lora, init=init))
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
    # Merged weights are rounded once more; one CPU gave 2.1 times the bound for Qwen3-Next.
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


@pytest.mark.sampled(10)
def test_what_peft_is_told(adapted: Adapted) -> None:
    """Whole names, so that no module of another part has an adapter or is trained; every tensor of the file is used, and saved again."""
    config = json.loads((adapted.exported / "adapter_config.json").read_text())
    file = load_file(adapted.exported / "adapter_model.safetensors")
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (3, 7, "LORA")
    assert config["base_model_name_or_path"] == str(adapted.folder)
    modules = dict(adapted.peft.get_base_model().named_modules())
    renames, parts = adapted.adapters.renames, adapted.adapters.whole
    told = {key: set(config.get(key) or ()) for key in ("target_modules", "modules_to_save")}
    for names in told.values():
        assert names == {each for name in names for each in renames.both(renames.former(name))}
        assert all(names & {*renames.both(renames.former(name))} & modules.keys() for name in names)
    assert {renames.former(name) for name in told["modules_to_save"]} == set(parts.modules)
    assert {renames.former(name) for name in file if ".lora_" not in name} == parts.names
    assert all(name.startswith("projector.image_newline") for name in parts.kept_frozen)
    loaded = peft.get_peft_model_state_dict(adapted.peft)
    assert file.keys() == {each for name in loaded for each in renames.both(renames.former(name))}
    for name, tensor in file.items():
        (held,) = (loaded[each] for each in renames.both(renames.former(name)) if each in loaded)
        torch.testing.assert_close(held, tensor, rtol=0, atol=0)


def test_an_adapter_of_another_model_or_rank_is_refused(
    checkpoint: Callable[[str], Path], cpu_world: Any, tmp_path: Path
) -> None:
    case = CASES["qwen3_vl"]
    adapted = load(case, checkpoint("qwen3_vl"), cpu_world, tmp_path / "export")

    def go_on(**changes: Any) -> None:
        recipe = adapted.zoo.recipe
        recipe = replace(recipe, lora=replace(recipe.lora, init=str(adapted.exported), **changes))
        _, adapters = with_adapters(recipe, cpu_world)
        lora_files.start(adapters, recipe)

    with pytest.raises(UserError, match=r"r is 3 there and 4 here; set lora.rank=3"):
        go_on(rank=4)
    with pytest.raises(UserError, match=r"lora_alpha is 7 there and 8.0 here; set lora.alpha=7"):
        go_on(alpha=8.0)
    with pytest.raises(UserError, match=r"q_proj.lora_A.weight: extra"):
        go_on(targets=["k_proj"])
    with pytest.raises(UserError, match=r"lora.targets=qproj: .*nearest: .*q_proj"):
        with_adapters(replace(adapted.zoo.recipe, lora=replace(adapted.zoo.recipe.lora, targets=["qproj"])), cpu_world)


@pytest.mark.parametrize("name", ["qwen3_omni", "qwen25_omni"])
def test_either_name_of_a_thinker_s_modules_is_read(
    name: str, checkpoint: Callable[[str], Path], cpu_world: Any, tmp_path: Path
) -> None:
    """transformers renamed them in 5.21, so a file has both; what it loads and saves again has one, and two that differ are refused."""
    case = replace(CASES[name], parts="language", whole="audio")
    adapted = load(case, checkpoint(name), cpu_world, tmp_path / "export")
    file, renames = adapted.exported / "adapter_model.safetensors", adapted.adapters.renames
    stored, wanted = load_file(file), adapted.adapters.named()
    former = {key for key in stored if key == renames.former(key)}
    moved = {key for key in former if len(renames.both(key)) > 1}
    assert moved and len(stored) == len(former) + len(moved)

    def go_on(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        save_file(dict(tensors), file)
        recipe = adapted.zoo.recipe
        recipe = replace(recipe, lora=replace(recipe.lora, init=str(adapted.exported)))
        _, adapters = with_adapters(recipe, cpu_world)
        lora_files.start(adapters, recipe)
        return adapters.named()

    later = stored.keys() - moved
    for names in (former, later, stored.keys()):
        taken = go_on({key: stored[key] for key in names})
        for key, tensor in wanted.items():
            torch.testing.assert_close(taken[key], tensor, rtol=0, atol=0)
    odd = renames.both(min(moved))[1]
    with pytest.raises(UserError, match=rf"{re.escape(odd)}.* are of one module and differ; leave out"):
        go_on({**stored, odd: stored[odd] + 1})


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("name", ["qwen3_vl", "qwen35_vl experts"])
def test_layers_that_are_made_again_drop_the_same(
    name: str, recompute: str, checkpoint: Callable[[str], Path], cpu_world: Any
) -> None:
    """The first layer's input needs no gradient; the layer is recomputed all the same."""
    case, found = replace(CASES[name], parts="language"), {}
    for how in ("none", recompute):
        recipe = recipe_of(case, checkpoint(name), "lora.dropout=0.4", f"engine.recompute={how}")
        zoo, _ = with_adapters(recipe, cpu_world)
        samples = [example.sample for example in case.family.examples(zoo.assembly.processor).values()]
        count = sum(sample.num_labels for sample in samples)
        seed_dropout(recipe, 3, cpu_world)
        found[how] = zoo.gradients([packed_batch(samples)], count)
        again = zoo.gradients([packed_batch(samples)], count)
        assert abs(again[0] - found[how][0]) > 1e-3, "other masks"
    assert found[recompute][0] == found["none"][0]
    for parameter, gradient in found["none"][1].items():
        other = found[recompute][1][parameter]
        assert (gradient is None) == (other is None)
        assert gradient is None or other is None or torch.equal(gradient, other), parameter


@pytest.mark.sampled(10)
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


@pytest.mark.parametrize("name", ["by pattern, experts", "DoRA, rank-stabilised, by pattern, merger whole"])
def test_adapters_on_top_of_an_adapter(name: str, cpu_world: Any, tmp_path: Path) -> None:
    """As peft has them: the first merged, the second on top; of LoRA, both active at once give the same."""
    case = replace(BOTH[name], parts="language", whole="")
    folder = case.family.write(tmp_path / "hf")
    first = load(case, folder, cpu_world, tmp_path / "first")
    recipe = recipe_of(case, folder, f"lora.merge_first={first.exported}", f"run.dir={tmp_path / 'run'}")
    assembly = build.assemble(recipe)
    chunks = build.build_model(assembly, recipe, cpu_world)
    assembly = lora_files.load_base(chunks, assembly, recipe, cpu_world, fresh=True, kept=True)
    adapters = adapt(chunks, assembly, recipe, cpu_world)
    with torch.no_grad():
        for parameter in adapters.named().values():
            parameter.mul_(0.9)
    exported = lora_files.export_adapters(adapters, tmp_path / "second", assembly, recipe, cpu_world, steps=0)
    zoo = replace(first.zoo, model=chunks[0].train(), recipe=recipe, assembly=assembly)
    batch = packed_batch(first.samples)
    merged = first.peft.merge_and_unload()
    on_top = peft.PeftModel.from_pretrained(merged, exported).eval()
    wanted = replace(first, plain=on_top.base_model.model).logits()
    assert worst(zoo.logits(batch), wanted) < 4 * LOGITS
    based = peft.PeftModel.from_pretrained(load_plain(tmp_path / "run" / "base"), exported).eval()
    assert worst(zoo.logits(batch), replace(first, plain=based.base_model.model).logits()) < 4 * LOGITS
    if not recipe.lora.dora:
        both = peft.PeftModel.from_pretrained(load_plain(folder), first.exported, adapter_name="first").eval()
        both.load_adapter(exported, "second")
        both.base_model.set_adapter(["first", "second"])
        assert worst(zoo.logits(batch), replace(first, plain=both.base_model.model).logits()) < 4 * LOGITS
    with pytest.raises(UserError, match=r"modules_to_save is .*which is not merged"):
        other = load(replace(case, whole="merger"), folder, cpu_world, tmp_path / "whole")
        lora_files.merge(chunks, other.exported, assembly, recipe, cpu_world)


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
