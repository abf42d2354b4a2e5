"""Preference pairs made of the digits: right against wrong answers, as rows, as samples and for transformers' models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from support.matrix import Model

MEDIA = ("image", "images", "video", "videos", "audio", "audios", "kind")
KINDS = ("image", "multi_image", "video", "text")
OF_MODELS = {  # kinds of rows that models of the matrix read, where these are not images and text
    "llava": ("image", "text"),
    "two-way": ("image", "multi_image", "text"),
    "full heads": ("image", "multi_image", "text"),
    "omni": ("audio", "image", "text"),
    "windows omni": ("audio", "image", "text"),
    "sound": ("audio", "text"),
    "text": ("text",),
    "capped": ("text",),
    "next": ("text",),
}
MORE = {
    "messages": [
        {"role": "user", "content": "Say a digit."},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "Say two."},
        {"role": "assistant", "content": "71"},
    ],
    "rejected_response": "I would rather not",
}  # with an answer that both have, and answers of other lengths


def digit_items(count: int, kinds: Sequence[str] = KINDS) -> list[dict[str, Any]]:
    """The first held-out rows of these kinds as pairs, as many of each kind, and one of several turns."""
    from zoo.data.digits import ROOT, with_wrong_answer

    items = [json.loads(line) for line in (ROOT / "heldout.jsonl").read_text().splitlines()]
    by_kind = [[item for item in items if item["kind"] == kind] for kind in kinds]
    mixed = [item for group in zip(*by_kind, strict=False) for item in group][: count - 1]
    return [MORE, *(with_wrong_answer(item) for item in mixed)]


def write_pairs(file: Path, count: int, kinds: Sequence[str] = KINDS) -> tuple[str, ...]:
    """Write pairs as JSONL; the overrides that train on them."""
    file.write_text("".join(json.dumps(item) + "\n" for item in digit_items(count, kinds)), encoding="utf-8")
    return _trains_on(file, kinds)


def write_labelled(file: Path, count: int, kinds: Sequence[str] = KINDS) -> tuple[str, ...]:
    """Write answers with labels as JSONL, two more undesirable ones than desirable; the overrides that train on them."""
    items = []
    for number, item in enumerate(digit_items(count, kinds)):
        good, wrong = item["messages"], item["rejected_response"]
        turns = good if number % 3 == 1 else [*good[:-1], {"role": "assistant", "content": wrong}]
        items.append({"messages": turns, "label": number % 3 == 1, **{k: item[k] for k in MEDIA if k in item}})
    file.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    return _trains_on(file, kinds)


def _trains_on(file: Path, kinds: Sequence[str]) -> tuple[str, ...]:
    from zoo.data.digits import ROOT

    root = () if tuple(kinds) == ("text",) else (f"data.root={ROOT}",)  # which text alone has no use for
    return (f"data.train=[{file}]", f"data.eval=[{file}]", *root)


@dataclass(frozen=True)
class Pair:
    """A pair's sample, and transformers' arguments and labels for each of the two conversations."""

    sample: Any
    halves: tuple[tuple[dict[str, Any], Tensor], ...]


def encoded_pairs(processor: Any, recipe: Any, references: Any = None) -> tuple[Any, list[Pair]]:
    """The source of a recipe's pairs, or labelled answers with the mismatched ones, and each pair."""
    from zoo.data.loading import pairs
    from zoo.data.loading.sample_source import SampleSource

    align = recipe.packing.align or 1
    source = SampleSource.open(
        recipe.data.train,
        processor,
        recipe.data,
        budget=recipe.packing.budget,
        align=align,
        pairs=recipe.train.pairs,
        labelled=recipe.train.labelled,
    )
    source.references = references
    found = []
    for number in range(len(source)):
        sample, halves = source.encode(number), []
        row, segments = source._row(number), sample.segments
        rows = pairs.labelled_rows_of(row) if sample.mismatched else pairs.rows_of(row)
        for row, segment in zip(rows, (*segments, sample.mismatched)[:2], strict=True):
            _, features = processor.encode_both(row, video_fps=2.0, max_frames=768)
            torch.testing.assert_close(features["input_ids"][0], segment.input_ids, rtol=0, atol=0)
            halves.append((features, segment.labels))
        found.append(Pair(sample, tuple(halves)))
    return source, found


def hf_logprobs(hf: Any, found: Sequence[Pair]) -> tuple[Tensor, Tensor]:
    """transformers' (2 P,) sums over the labels of each conversation, run by itself, and how many labels these are."""
    sums, counts = [], []
    for features, labels in (half for pair in found for half in pair.halves):
        every = hf(**features).logits[0].float().log_softmax(-1)[:-1]
        mask = labels[1:] != -100
        sums.append(every.gather(1, features["input_ids"][0, 1:, None])[mask, 0].sum())
        counts.append(int(mask.sum()))
    return torch.stack(sums), torch.tensor(counts)


def plain_loss(kind: str, logprobs: Tensor, labels: Tensor, reference: Tensor, *, beta: float, gamma: float) -> Tensor:
    """The mean over pairs as TRL 1.16 writes it: trainer/dpo_trainer.py `_compute_loss`, experimental/cpo `cpo_loss`,
    experimental/orpo `odds_ratio_loss`; ORPO's likelihood is that of the paper (arXiv 2403.07691, eq. 6), the answer's mean."""
    log_sigmoid = torch.nn.functional.logsigmoid
    ratio = logprobs - reference
    mean = logprobs / labels
    if kind == "dpo":
        losses = -log_sigmoid(beta * (ratio[::2] - ratio[1::2]))
    elif kind == "ipo":
        losses = ((ratio / labels)[::2] - (ratio / labels)[1::2] - 1 / (2 * beta)) ** 2
    elif kind == "simpo":
        losses = -log_sigmoid(beta * (mean[::2] - mean[1::2] - gamma / beta))
    else:
        odds = mean - torch.log(1 - mean.exp())
        losses = -mean[::2] - beta * log_sigmoid(odds[::2] - odds[1::2])
    return losses.mean()


def hf_scores(hf: Any, found: Sequence[Pair]) -> Tensor:
    """(2 P,) of transformers' model whose `lm_head` gives one number: that of each conversation's last token, run by itself."""
    return torch.stack([hf(**features).logits[0, -1, 0] for pair in found for features, _ in pair.halves])


def classifier(name: str) -> Any:
    """transformers' class; where it has none, what its documentation has one write: the generic one of the same model."""
    from transformers import AutoModelForSequenceClassification, LlavaOnevisionPreTrainedModel, Qwen3VLPreTrainedModel
    from transformers.modeling_layers import GenericForSequenceClassification

    if name in ("gdn", "text", "capped", "next"):
        return AutoModelForSequenceClassification
    base = {"dense": Qwen3VLPreTrainedModel, "llava": LlavaOnevisionPreTrainedModel}[name]
    return type("Classifier", (GenericForSequenceClassification, base), {"forward": _forward})


def _forward(self: Any, **features: Any) -> Any:
    return SimpleNamespace(logits=self.score(self.model(**features).last_hidden_state)[:, -1])


def plain_reward(scores: Tensor, center: float) -> Tensor:
    """The mean over pairs as TRL 1.16 writes it: trainer/reward_trainer.py `compute_loss`."""
    chosen, rejected = scores[::2], scores[1::2]
    loss = -torch.nn.functional.logsigmoid(chosen - rejected).mean()
    return loss + center * torch.mean((chosen + rejected) ** 2)


def plain_kto(logprobs: Tensor, reference: Tensor, desirable: Tensor, *, beta: float) -> Tensor:
    """The mean over answers as TRL 1.16 writes it: trainer/kto_trainer.py `_compute_loss`; both (2 N,), of own and mismatched
    answers by turns, weights of 1.5 and 1."""
    ratio = logprobs - reference
    kl = ratio[1::2].mean().detach().clamp(min=0)
    own = ratio[::2]
    chosen = 1 - torch.sigmoid(beta * (own - kl))
    rejected = 1 - torch.sigmoid(beta * (kl - own))
    return torch.where(desirable, 1.5 * chosen, rejected).mean()


def pair_run(
    rank: int, size: int, recipe: str, overrides: tuple[str, ...], metric: str = "rewards/chosen"
) -> list[dict[str, Any]]:
    """A run on this rank; the records of its steps and evaluations that hold a metric, of the first rank's log."""
    from support.recipes import load_effective
    from zoo.training.trainer import run_rank

    fixed = ["hardware=cpu", "engine.threads=1", "export=false", "log.tensorboard=false", "log.predictions=0"]
    made = load_effective(recipe, [*fixed, *overrides])
    run_rank(made)
    return records(Path(str(made.run.dir)), metric)


def records(folder: Path, metric: str = "rewards/chosen") -> list[dict[str, Any]]:
    """Lines of a run's log that hold a metric."""
    lines = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    return [line for line in lines if metric in line]


def pair_zoo(folder: Path, model: Model, world: Any, *overrides: str) -> Any:
    """A model of the matrix in zoo, in training mode."""
    from support.engine import Zoo, recipe_for

    recipe = recipe_for(folder, *overrides, recipe=model.recipe)
    return Zoo.from_recipe(replace(recipe, train=replace(recipe.train, mtp_loss=0.0)), world)
