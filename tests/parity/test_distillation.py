"""A student's loss and every gradient are those of transformers' logits of student and teacher, written out in plain torch."""

from pathlib import Path

import pytest
import torch
from support import tiny_qwen3_vl
from support.engine import Zoo, recipe_for, single_process_world
from support.matrix import MODELS
from support.pairs import assert_hf_gradients
from support.preference import KINDS, write_pairs
from support.tiny import load_thinker
from torch import Tensor

from zoo.data.loading.batches import make_batch
from zoo.data.loading.sample_source import SampleSource
from zoo.errors import UserError
from zoo.model import build
from zoo.training.distillation.teacher import Teacher
from zoo.training.distillation.token_files import TokenReader

WEIGHT, TEMPERATURE, TOP = 0.7, 1.7, 5
LIMIT = 5e-5  # relative


def other_weights(folder: Path, other: Path) -> Path:
    """The same model with weights of its own."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, other)
    draw = torch.Generator().manual_seed(5)
    for file in other.glob("*.safetensors"):
        tensors = {name: x + 0.1 * torch.randn(x.shape, generator=draw) for name, x in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    return other


def plain_loss(student: Tensor, teacher: Tensor, targets: Tensor) -> Tensor:
    """(N,) of logits (N, vocab): cross entropy, and forward KL over the teacher's most likely tokens and the rest."""
    ce = torch.nn.functional.cross_entropy(student, targets, reduction="none")
    p, log_q = (teacher / TEMPERATURE).softmax(-1), (student / TEMPERATURE).log_softmax(-1)
    top, ids = p.topk(TOP, dim=-1)
    kl = (top * (top.log() - log_q.gather(1, ids))).sum(-1)
    if p.shape[-1] > TOP:
        rest = p.scatter(1, ids, 0.0).sum(-1)
        kl = kl + rest * (rest.log() - log_q.scatter(1, ids, float("-inf")).logsumexp(-1))
    return (1 - WEIGHT) * ce + WEIGHT * TEMPERATURE**2 * kl


@pytest.mark.parametrize(
    "name", ["dense", *(pytest.param(one, marks=pytest.mark.slow) for one in ("gdn", "moe", "omni", "llava"))]
)
def test_loss_and_gradients_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    folder = model.write(tmp_path / "model")
    teacher = other_weights(folder, tmp_path / "teacher")
    hf, theirs = load_thinker(folder), load_thinker(teacher)
    kinds = ("audio", "image", "text") if name == "omni" else ("image", "text") if name == "llava" else KINDS
    data = write_pairs(tmp_path / "rows.jsonl", 4, kinds)
    more = (
        f"distill.teacher={teacher}", f"distill.weight={WEIGHT}", f"distill.temperature={TEMPERATURE}", f"distill.top_k={TOP}",
    )  # fmt: skip
    with single_process_world() as world:
        recipe = recipe_for(folder, *data, *model.overrides, *more, recipe=model.recipe)
        zoo = Zoo.from_recipe(recipe, world)
        assembly = zoo.assembly
        source = SampleSource.open(recipe.data.train, assembly.processor, recipe.data, budget=1024, align=4)
        samples, losses = [], []
        for number in range(len(source)):
            sample = source.encode(number)
            _, features = assembly.processor.encode_both(source.rows[number], video_fps=2.0, max_frames=768)
            mask = sample.labels[1:] != -100
            targets = sample.labels[1:][mask]
            with torch.no_grad():
                wanted = theirs(**features).logits[0, :-1][mask].float()
            losses.append(plain_loss(hf(**features).logits[0, :-1][mask].float(), wanted, targets))
            samples.append(sample)
        total = torch.cat(losses)
        total.mean().backward()
        whole = Teacher(recipe, assembly, world)
        for mode in ("thd", "none"):
            whole.step = zoo.step(align=4, mode=mode)
            batches = whole([make_batch(part, mode, 4, None, 0) for part in (samples[:3], samples[3:])])
            loss, gradients = zoo.gradients(batches, len(total), align=4, mode=mode)
            assert loss == pytest.approx(float(total.mean().detach()), rel=1e-5)
            assert_hf_gradients(zoo, gradients, hf, model.publish, LIMIT)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "omni"])
def test_a_teacher_on_disk_is_that_of_the_run(name: str, tmp_path: Path) -> None:
    """With all tokens, and with five; written packed, read packed and padded, in another order of rows."""
    import zoo as api

    model = MODELS[name]
    folder = model.write(tmp_path / "model")
    teacher = other_weights(folder, tmp_path / "teacher")
    kinds = ("audio", "image", "text") if name == "omni" else KINDS
    data = write_pairs(tmp_path / "rows.jsonl", 4, kinds)
    more = (f"distill.teacher={teacher}", f"distill.weight={WEIGHT}", f"distill.temperature={TEMPERATURE}")
    with single_process_world() as world:
        recipe = recipe_for(folder, *data, *model.overrides, *more, recipe=model.recipe)
        vocabulary = build.assemble(recipe).config.text.vocab_size
    out, root = tmp_path / "spoken", data[-1]
    given = ("hardware=cpu", "engine.threads=1", root, "packing.budget=1024")
    done = api.top_tokens(
        teacher, tmp_path / "rows.jsonl", out, given, top_k=vocabulary, temperature=TEMPERATURE, in_process=True
    )
    assert done["rows"] == 4 and done["files"] == 1
    again = api.top_tokens(
        teacher, tmp_path / "rows.jsonl", out, given, top_k=vocabulary, temperature=TEMPERATURE, in_process=True
    )
    assert again == done | {"files": 0}
    with single_process_world() as world:
        for k in (vocabulary, TOP):
            recipe = recipe_for(folder, *data, *model.overrides, *more, f"distill.top_k={k}", recipe=model.recipe)
            zoo = Zoo.from_recipe(recipe, world)
            assembly = zoo.assembly
            source = SampleSource.open(recipe.data.train, assembly.processor, recipe.data, budget=1024, align=4)
            order = [2, 0, 3, 1]
            plain = [source.encode(number) for number in order]
            source.teacher = TokenReader(str(out), recipe.distill, vocabulary)
            taught = [source.encode(number) for number in order]
            whole, labels = Teacher(recipe, assembly, world), sum(sample.num_labels for sample in plain)
            for mode in ("thd", "none"):
                whole.step = zoo.step(align=4, mode=mode)
                in_run = whole([make_batch(part, mode, 4, None, 0) for part in (plain[:3], plain[3:])])
                on_disk = [make_batch(part, mode, 4, None, 0) for part in (taught[:3], taught[3:])]
                wanted, gradients = zoo.gradients(in_run, labels, align=4, mode=mode)
                found, others = zoo.gradients(on_disk, labels, align=4, mode=mode)
                assert found == pytest.approx(wanted, rel=1e-5)
                for key, want in gradients.items():
                    if want is not None:
                        torch.testing.assert_close(others[key], want, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_a_teacher_of_other_tokens_is_refused(tmp_path: Path) -> None:
    folder = MODELS["dense"].write(tmp_path / "model")
    other = tiny_qwen3_vl.write_tiny_qwen3_vl(tmp_path / "other", vocab_size=512)
    with single_process_world() as world:
        recipe = recipe_for(folder, f"distill.teacher={other}", recipe="qwen3_vl_sft")
        with pytest.raises(UserError, match="a vocabulary of 512 tokens"):
            Teacher(recipe, build.assemble(recipe), world)
