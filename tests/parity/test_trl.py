"""Losses of preferences and every gradient are those of TRL's own trainers, where TRL is installed.

`pip install --no-deps --target FOLDER trl`, and PYTHONPATH=FOLDER.
"""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.adapters import adapt, peft_gradients, published_gradients
from support.engine import single_process_world
from support.preference import Pair, encoded_pairs, hf_logprobs, pair_zoo, write_labelled, write_pairs
from support.tiny import load_plain
from support.tiny_qwen3 import write_tiny_qwen3
from torch import Tensor

from zoo.checkpoint import lora_files
from zoo.data.loading.batches import make_batch
from zoo.training.passes.auxiliary_passes import KLEstimate

pytestmark = pytest.mark.slow
FAMILY: Any = SimpleNamespace(recipe="qwen3_sft")
COMMON = {
    "report_to": "none", "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "max_length": None,
    "per_device_train_batch_size": 5,
}  # fmt: skip


def padded(halves: Sequence[tuple[Any, Tensor]], prefix: str = "") -> dict[str, Tensor]:
    """What TRL's collators make of conversations and their labels."""
    rows = [features["input_ids"][0] for features, _ in halves]
    pad = torch.nn.utils.rnn.pad_sequence
    masks = [(labels != -100).long() for _, labels in halves]
    named = {"input_ids": rows, "attention_mask": [torch.ones_like(row) for row in rows], "completion_mask": masks}
    return {prefix + name: pad(parts, batch_first=True) for name, parts in named.items()}


def trainer_of(kind: Any, folder: Path, model: Any, settings: Any, row: dict[str, Any], **more: Any) -> Any:
    """One of TRL's trainers; its own data are not used."""
    datasets = pytest.importorskip("datasets")
    from transformers import AutoTokenizer

    rows = datasets.Dataset.from_list([row] * 5)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return kind(model=model, args=settings, train_dataset=rows, processing_class=tokenizer, **more)


def batches_of(found: Sequence[Pair]) -> list[Any]:
    samples = [pair.sample for pair in found]
    return [make_batch(part, "thd", 4, None, 0) for part in (samples[:3], samples[3:])]


def same_gradients(zoo: Any, gradients: dict[str, Any], hf: Any) -> None:
    found = zoo.published(gradients)
    for name, parameter in hf.named_parameters():
        error = float((found[name] - parameter.grad).norm() / parameter.grad.norm())
        assert error < 5e-5, (name, error)


@pytest.mark.parametrize(("kind", "theirs"), [("dpo", "sigmoid"), ("ipo", "ipo")])
def test_pairs(kind: str, theirs: str, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    folder, other = (write_tiny_qwen3(tmp_path / name, seed=seed) for seed, name in enumerate(("model", "other")))
    data = write_pairs(tmp_path / "pairs.jsonl", 5, ("text",))
    hf, reference = load_plain(folder), load_plain(other)
    with single_process_world() as world:
        zoo = pair_zoo(folder, FAMILY, world, *data, f"train.loss={kind}", "train.beta=0.4")
        _, found = encoded_pairs(zoo.assembly.processor, zoo.recipe)
        with torch.no_grad():
            known = hf_logprobs(reference, found)[0].view(-1, 2).numpy()
        _, found = encoded_pairs(zoo.assembly.processor, zoo.recipe, known)
        settings = trl.DPOConfig(output_dir=str(tmp_path), beta=0.4, loss_type=theirs, **COMMON)
        row = {"prompt": "a", "chosen": "b", "rejected": "c"}
        trainer = trainer_of(trl.DPOTrainer, folder, hf, settings, row, ref_model=reference)
        inputs = padded([pair.halves[0] for pair in found] + [pair.halves[1] for pair in found])
        wanted = trainer.compute_loss(trainer.model, inputs)
        wanted.backward()
        loss, gradients = zoo.gradients(batches_of(found), len(found), align=4)
        assert loss == pytest.approx(float(wanted.detach()), rel=1e-5)
        same_gradients(zoo, gradients, hf)


def test_labelled_answers(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    folder, other = (write_tiny_qwen3(tmp_path / name, seed=seed) for seed, name in enumerate(("model", "other")))
    data = write_labelled(tmp_path / "labelled.jsonl", 5, ("text",))
    hf, reference = load_plain(folder), load_plain(other)
    with single_process_world() as world:
        more = ("train.loss=kto", "train.beta=0.4", "train.desirable_weight=1.5")
        zoo = pair_zoo(folder, FAMILY, world, *data, *more)
        _, found = encoded_pairs(zoo.assembly.processor, zoo.recipe)
        with torch.no_grad():
            known = hf_logprobs(reference, found)[0].view(-1, 2).numpy()
        _, found = encoded_pairs(zoo.assembly.processor, zoo.recipe, known)
        settings = trl.KTOConfig(output_dir=str(tmp_path), beta=0.4, desirable_weight=1.5, **COMMON)
        row = {"prompt": "a", "completion": "b", "label": True}
        trainer = trainer_of(trl.KTOTrainer, folder, hf, settings, row, ref_model=reference)
        inputs = padded([pair.halves[0] for pair in found])
        inputs |= padded([pair.halves[1] for pair in found], "KL_")
        inputs["label"] = torch.tensor([pair.sample.desirable for pair in found])
        assert 0 < int(inputs["label"].sum()) < len(found)
        wanted = trainer.compute_loss(trainer.model, inputs)
        wanted.backward()
        batches = KLEstimate(zoo.step(align=4), [zoo.model], world)(batches_of(found))
        loss, gradients = zoo.gradients(batches, len(found), align=4)
        assert loss == pytest.approx(float(wanted.detach()), rel=1e-5)
        same_gradients(zoo, gradients, hf)


@pytest.mark.parametrize("adapters", [False, True])
def test_rewards(adapters: bool, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    import peft
    from transformers import AutoModelForSequenceClassification

    folder = write_tiny_qwen3(tmp_path / "model")
    data = write_pairs(tmp_path / "pairs.jsonl", 5, ("text",))
    with single_process_world() as world:
        more = ("train.loss=reward", "train.center_rewards=0.3", *(["lora.rank=2"] if adapters else []))
        zoo = pair_zoo(folder, FAMILY, world, *data, *more)
        hf = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
        hf.config.pad_token_id = zoo.assembly.processor.pad_id
        if adapters:
            ours = adapt([zoo.model], zoo.assembly, zoo.recipe, world)
            lora_files.export_adapters(ours, tmp_path / "adapter", zoo.assembly, zoo.recipe, world, 0)
            hf = peft.PeftModel.from_pretrained(hf, tmp_path / "adapter", is_trainable=True)
        else:
            hf.score.weight.data.copy_(dict(zoo.model.named_parameters())["score.weight"].detach())
        _, found = encoded_pairs(zoo.assembly.processor, zoo.recipe)
        settings = trl.RewardConfig(output_dir=str(tmp_path), center_rewards_coefficient=0.3, **COMMON)
        row = {"chosen": "b", "rejected": "c"}
        trainer = trainer_of(trl.RewardTrainer, folder, hf.train(), settings, row)
        inputs = padded([pair.halves[0] for pair in found] + [pair.halves[1] for pair in found])
        inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, hf.config.pad_token_id)
        del inputs["completion_mask"]
        wanted = trainer.compute_loss(trainer.model, inputs)
        wanted.backward()
        loss, gradients = zoo.gradients(batches_of(found), len(found), align=4)
        assert loss == pytest.approx(float(wanted.detach()), rel=1e-5)
        if not adapters:
            return same_gradients(zoo, gradients, hf)
        names = {id(parameter): name for name, parameter in zoo.model.named_parameters()}
        published, theirs = published_gradients(ours, gradients, names), peft_gradients(trainer.model)
        assert published.keys() == theirs.keys()
        for name, grad in theirs.items():
            assert float((published[name] - grad).norm()) < 5e-5 * max(float(grad.norm()), 1e-3), name
