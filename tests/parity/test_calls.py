"""No call leaves a trace: packed, padded, evaluation and text-only calls alternate on one model."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from support.engine import Zoo, packed_batch, padded_batch
from support.rows import Example, vision_examples
from support.tiny_omni import TinyOmni
from support.tiny_qwen35 import write_tiny_qwen35
from torch import Tensor

Call = Callable[[Zoo], dict[str, Tensor]]


def forward(zoo: Zoo, batch: Any, **packing: Any) -> dict[str, Tensor]:
    return {str(row): logits for row, logits in enumerate(zoo.logits(batch, **packing))}


def train(zoo: Zoo, batch: Any, **packing: Any) -> dict[str, Tensor]:
    loss, gradients = zoo.gradients([batch], 10, **packing)
    return {"loss": torch.tensor(loss), **{n: g for n, g in gradients.items() if g is not None}}


@torch.no_grad()
def evaluate(zoo: Zoo, batch: Any, **packing: Any) -> dict[str, Tensor]:
    zoo.model.eval()
    output, loss = zoo.step(**packing)(iter([batch]), zoo.model, loss_scale=1.0, evaluate=True)
    zoo.model.train()
    return loss(output)[1]


@dataclass(frozen=True)
class Subject:
    """A checkpoint, how to load it, and its rows."""

    load: Callable[[], Zoo]
    examples: dict[str, Example]
    few: tuple[str, ...]  # rows of the smaller batches


@pytest.fixture(scope="module", params=["experts, deepstack, audio", "hybrid with experts and MTP"])
def subject(
    request: pytest.FixtureRequest,
    tiny_omni: TinyOmni,
    examples: dict[str, Example],
    cpu_world: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Subject:
    if "audio" in request.param:
        few = ("image+video+audio", "audio-short", "text-short")
        return Subject(lambda: Zoo.load(tiny_omni.thinker, cpu_world), examples, few)
    folder = write_tiny_qwen35(tmp_path_factory.mktemp("calls"), moe=True, mtp=1)
    load = partial(Zoo.load, folder, cpu_world, "model.family=qwen35_vl")
    return Subject(load, vision_examples(load().assembly.processor), ("image+video", "video-short", "text-short"))


def calls(subject: Subject) -> dict[str, Call]:
    samples = {name: example.sample for name, example in subject.examples.items()}
    everything = list(samples.values())
    texts = [samples["text-short"], samples["text-long"]]
    few = [samples[name] for name in subject.few]
    return {
        "train packed": lambda zoo: train(zoo, packed_batch(everything), align=4),
        "train padded": lambda zoo: train(zoo, padded_batch(few, "left"), mode="none"),
        "train text": lambda zoo: train(zoo, packed_batch(texts)),
        "evaluate packed": lambda zoo: evaluate(zoo, packed_batch(few), pad_to=256),
        "evaluate padded": lambda zoo: evaluate(zoo, padded_batch(everything[:5]), mode="none"),
        "forward packed": lambda zoo: forward(zoo, packed_batch(everything[::-1])),
        "forward one": lambda zoo: forward(zoo, packed_batch(few[:1])),
        "forward text": lambda zoo: forward(zoo, padded_batch(texts), mode="none"),
    }


@pytest.mark.sampled(4)
def test_alternating_calls_give_what_a_fresh_model_gives(subject: Subject) -> None:
    """To the bit: the same call does the same arithmetic, whatever came before it."""
    kinds = calls(subject)
    fresh = {name: call(subject.load()) for name, call in kinds.items()}
    used = subject.load()
    weights = {name: parameter.clone() for name, parameter in used.model.named_parameters()}
    order = list(kinds) * 3
    random.Random(0).shuffle(order)
    for turn, name in enumerate(order):
        for key, found in kinds[name](used).items():
            torch.testing.assert_close(
                found, fresh[name][key], rtol=0, atol=0, msg=f"{name}: {key} after {order[:turn]}: {{}}".format
            )
    for name, parameter in used.model.named_parameters():
        torch.testing.assert_close(parameter, weights[name], rtol=0, atol=0)


@pytest.mark.sampled(2)
def test_a_call_writes_nothing_on_the_modules(subject: Subject) -> None:
    zoo = subject.load()

    def attributes() -> dict[tuple[str, str], Any]:
        """Every plain attribute of every module; held, so that no identity is used again."""
        hidden = ("_parameters", "_buffers", "_modules", "training")
        modules = zoo.model.named_modules()
        return {(name, key): value for name, m in modules for key, value in vars(m).items() if key not in hidden}

    before = attributes()
    for called, call in calls(subject).items():
        call(zoo)
        after = attributes()
        assert after.keys() == before.keys(), called
        assert not [place for place, value in after.items() if value is not before[place]], called


def test_media_that_no_token_asks_for(zoo: Zoo, examples: dict[str, Example]) -> None:
    """A batch of a foreign loop with more, or fewer, media than placeholders is refused, not shifted."""
    one, two = examples["image+video+audio"].sample, examples["text-long"].sample
    batch = packed_batch([one, two])
    twice = {name: torch.cat((tensor, tensor)) for name, tensor in batch.media.items()}
    with pytest.raises(ValueError, match="have no place in the tokens"):
        zoo.step().prepare(replace(batch, media=twice))
    with pytest.raises(ValueError, match="more images than the batch has"):
        zoo.step().prepare(replace(batch, media={}))
