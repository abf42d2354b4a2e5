"""Losses of preference pairs and every gradient are those of transformers' model on each conversation by itself."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.adapters import adapt, peft_gradients, published_gradients
from support.engine import single_process_world
from support.matrix import MODELS
from support.pairs import assert_hf_gradients
from support.preference import (
    KINDS,
    OF_MODELS,
    classifier,
    encoded_pairs,
    hf_logprobs,
    hf_scores,
    pair_zoo,
    plain_kto,
    plain_loss,
    plain_reward,
    write_labelled,
    write_pairs,
)
from support.tiny import load_plain, load_thinker

from zoo.checkpoint import lora_files
from zoo.data.loading.batches import make_batch
from zoo.training.passes.auxiliary_passes import BaseModelReference, KLEstimate

LIMIT = 5e-5  # relative
ADAPTER_LIMITS = {"gdn": 2e-4}  # transformers' own in float32 and in float64 are up to 9e-5 apart
LOSSES = ("dpo", "ipo", "simpo", "orpo")
OTHERS = (
    *("gdn", "moe", "omni", "llava", "windows", "windows omni", "tiles", "two-way", "full heads", "sigmoid", "sound"),
    *("text", "capped", "next"),
)
CASES = [("dense", LOSSES), *((name, ("dpo", "orpo")) for name in OTHERS)]


@pytest.mark.parametrize(
    ("name", "losses"), [pytest.param(*case, marks=[] if case[0] == "dense" else pytest.mark.slow) for case in CASES]
)
def test_loss_and_gradients_are_those_of_transformers(name: str, losses: tuple[str, ...], tmp_path: Path) -> None:
    model = MODELS[name]
    folder = model.write(tmp_path / "model")
    hf = load_thinker(folder)
    kinds = OF_MODELS.get(name, KINDS)
    data = write_pairs(tmp_path / "pairs.jsonl", 5, kinds)
    with single_process_world() as world:
        references = None
        for kind in losses:
            zoo = pair_zoo(folder, model, world, *data, *model.overrides, f"train.loss={kind}", "train.beta=0.4")
            if references is None:
                draw = np.random.default_rng(0)
                _, found = encoded_pairs(zoo.assembly.processor, zoo.recipe)
                logprobs, labels = hf_logprobs(hf, found)
                references = (logprobs.detach().numpy() + draw.normal(size=len(logprobs))).astype(np.float32)
                count = len(found)
            _, found = encoded_pairs(zoo.assembly.processor, zoo.recipe, references.reshape(-1, 2))
            wanted = plain_loss(kind, logprobs, labels, torch.tensor(references), beta=0.4, gamma=0.5)
            hf.zero_grad()
            wanted.backward(retain_graph=True)
            samples = [pair.sample for pair in found]
            batches = [make_batch(part, "thd", 4, None, 0) for part in (samples[:3], samples[3:])]
            assert sum(batch.label_weight for batch in batches) == count
            assert batches[0].layout.num_segments == 6
            for packing in ({"align": 4}, {"align": 4, "mode": "none"}):
                loss, gradients = zoo.gradients(batches, count, **packing)
                assert loss == pytest.approx(float(wanted.detach()), rel=1e-5)
                assert_hf_gradients(zoo, gradients, hf, model.publish, LIMIT)


@pytest.mark.parametrize(
    "name", ["dense", *(pytest.param(one, marks=pytest.mark.slow) for one in ("gdn", "moe", "omni", "llava"))]
)
def test_loss_and_gradients_of_labelled_answers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """KTO's divergence is that of the whole step, whatever its micro-batches; packed and padded."""
    model = MODELS[name]
    folder = model.write(tmp_path / "model")
    hf = load_thinker(folder)
    kinds = OF_MODELS.get(name, ("image", "text"))
    data = write_labelled(tmp_path / "labelled.jsonl", 5, kinds)
    more = ("train.loss=kto", "train.beta=0.4", "train.desirable_weight=1.5")
    with single_process_world() as world:
        zoo = pair_zoo(folder, model, world, *data, *model.overrides, *more)
        _, found = encoded_pairs(zoo.assembly.processor, zoo.recipe)
        logprobs, _ = hf_logprobs(hf, found)
        moved = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(0))
        moved[1::2] = moved[1::2].abs()  # so that the divergence is above 0
        reference = logprobs.detach() - moved
        _, found = encoded_pairs(zoo.assembly.processor, zoo.recipe, reference.view(-1, 2).numpy())
        samples = [pair.sample for pair in found]
        desirable = torch.tensor([sample.desirable for sample in samples])
        assert 0 < int(desirable.sum()) < len(samples)
        wanted = plain_kto(logprobs, reference, desirable, beta=0.4)
        wanted.backward()
        for packing in ({"align": 4}, {"align": 4, "mode": "none"}):
            step = zoo.step(**packing)
            mode = packing.get("mode", "thd")
            batches = [make_batch(part, mode, 4, None, 0) for part in (samples[:3], samples[3:])]
            batches = KLEstimate(step, [zoo.model], world)(batches)
            assert float(batches[0].kl) == pytest.approx(float(moved[1::2].mean()), rel=1e-4)
            loss, gradients = zoo.gradients(batches, len(samples), **packing)
            assert loss == pytest.approx(float(wanted.detach()), rel=1e-5)
            assert_hf_gradients(zoo, gradients, hf, model.publish, LIMIT)


@pytest.mark.parametrize("name", ["dense", *(pytest.param(one, marks=pytest.mark.slow) for one in OTHERS)])
def test_rewards_and_gradients_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """The score of each answer's last token, and Bradley-Terry's loss; the head is drawn anew, as the checkpoint has none."""
    model = MODELS[name]
    folder = model.write(tmp_path / "model")
    hf = load_thinker(folder)
    kinds = OF_MODELS.get(name, ("image", "text"))
    data = write_pairs(tmp_path / "pairs.jsonl", 4, kinds)
    more = ("train.loss=reward", "train.center_rewards=0.3")
    with single_process_world() as world:
        zoo = pair_zoo(folder, model, world, *data, *model.overrides, *more)
        head = dict(zoo.model.named_parameters())["score.weight"].detach()
        assert 0.01 < float(head.std()) < 0.05
        hf.lm_head = torch.nn.Linear(head.shape[1], 1, bias=False)
        hf.lm_head.weight.data.copy_(head)
        hf.config.get_text_config().final_logit_softcapping = None  # transformers' classifiers cap no score
        _, found = encoded_pairs(zoo.assembly.processor, zoo.recipe)
        wanted = plain_reward(hf_scores(hf, found), 0.3)
        wanted.backward()
        samples = [pair.sample for pair in found]
        batches = [make_batch(part, "thd", 4, None, 0) for part in (samples[:3], samples[3:])]
        for packing in ({"align": 4}, {"align": 4, "mode": "none"}):
            loss, gradients = zoo.gradients(batches, len(samples), **packing)
            assert loss == pytest.approx(float(wanted.detach()), rel=1e-5)
            grad = hf.lm_head.weight.grad
            assert float((gradients.pop("score.weight") - grad).norm()) < LIMIT * float(grad.norm())
            hf.lm_head.weight.grad = None
            assert_hf_gradients(zoo, gradients, hf, model.publish, LIMIT)
            hf.lm_head.weight.grad = grad


@pytest.mark.slow
@pytest.mark.parametrize("name", ["text", "dense", "gdn", "capped", "next"])
def test_adapters_of_a_reward_model_are_those_of_peft(name: str, tmp_path: Path) -> None:
    """peft loads adapters and head onto transformers' classifier: loss and every gradient; what peft saves is gone on with."""
    import peft

    model = MODELS[name]
    folder = model.write(tmp_path / "model")
    data = write_pairs(tmp_path / "pairs.jsonl", 3, OF_MODELS.get(name, ("image", "text")))
    more = (*data, *model.overrides, "lora.rank=2", "train.loss=reward", "train.center_rewards=0.3")
    with single_process_world() as world:
        zoo = pair_zoo(folder, model, world, *more)
        adapters = adapt([zoo.model], zoo.assembly, zoo.recipe, world)
        lora_files.export_adapters(adapters, tmp_path / "adapter", zoo.assembly, zoo.recipe, world, 0)
        plain = {"experts_implementation": "eager"} if name in ("text", "next") else {}  # odd widths
        base = classifier(name).from_pretrained(folder, num_labels=1, dtype=torch.float32, **plain)
        hf = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True).eval()
        assert isinstance(hf, peft.PeftModelForSequenceClassification)
        _, found = encoded_pairs(zoo.assembly.processor, zoo.recipe)
        halves = [features for pair in found for features, _ in pair.halves]
        scores = torch.cat([hf.base_model.model(**features).logits.flatten() for features in halves])
        wanted = plain_reward(scores, 0.3)
        wanted.backward()
        batch = make_batch([pair.sample for pair in found], "thd", 4, None, 0)
        loss, gradients = zoo.gradients([batch], len(found), align=4)
        assert loss == pytest.approx(float(wanted.detach()), rel=1e-5)
        names = {id(parameter): name for name, parameter in zoo.model.named_parameters()}
        trained = {name: names[id(parameter)] for name, parameter in adapters.named().items()}
        assert {name for name, grad in gradients.items() if grad is not None} == set(trained.values())
        hf.save_pretrained(tmp_path / "by_peft")
        published, theirs = published_gradients(adapters, gradients, names), peft_gradients(hf)
        assert published.keys() == theirs.keys()
        for key, grad in theirs.items():
            error = float((published[key] - grad).norm())
            assert error < ADAPTER_LIMITS.get(name, LIMIT) * max(float(grad.norm()), 1e-3), key
        init = replace(zoo.recipe.lora, init=str(tmp_path / "by_peft"))
        lora_files.start(adapters, replace(zoo.recipe, lora=init))
        again, _ = zoo.gradients([batch], len(found), align=4)
        assert again == loss


def test_the_base_is_the_model_without_adapters(tmp_path: Path) -> None:
    """The reference of train.reference=base is transformers' model, the policy peft's; the adapters are back afterwards."""
    import peft

    model = MODELS["moe"]
    folder = model.write(tmp_path / "model")
    data = write_pairs(tmp_path / "pairs.jsonl", 3, ("image",))
    lora = ("lora.rank=2", "lora.targets=[all-linear,experts.gate_up_proj,experts.down_proj]")
    more = (*data, *model.overrides, *lora, "train.loss=dpo", "train.reference=base", "train.beta=0.4")
    with single_process_world() as world:
        zoo = pair_zoo(folder, model, world, *more)
        adapters = adapt([zoo.model], zoo.assembly, zoo.recipe, world)
        lora_files.export_adapters(adapters, tmp_path / "adapter", zoo.assembly, zoo.recipe, world, 0)
        _, found = encoded_pairs(zoo.assembly.processor, zoo.recipe)
        batch = make_batch([pair.sample for pair in found], "thd", 4, None, 0)
        step = zoo.step(align=4)
        (made,) = BaseModelReference(adapters, step, [zoo.model], world)([batch])
        loss, _ = zoo.gradients([made], len(found), align=4)
    hf = load_plain(folder)
    with torch.no_grad():
        base, labels = hf_logprobs(hf, found)
        policy, _ = hf_logprobs(peft.PeftModel.from_pretrained(hf, tmp_path / "adapter"), found)
    torch.testing.assert_close(made.reference, base, rtol=1e-5, atol=1e-4)
    assert float((policy - base).abs().max()) > 0.1
    wanted = plain_loss("dpo", policy, labels, base, beta=0.4, gamma=0.5)
    assert loss == pytest.approx(float(wanted), rel=1e-4)
