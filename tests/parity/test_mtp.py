"""Multi-token prediction against its definition, sample by sample on transformers' own layers.

transformers has no module for `mtp.*`. The reference joins what its decoder gives at token t with its embedding of token
t+1 (a medium's, from its tower, where that is one), runs its decoder layer with the published tensors at the positions of
the tokens t, and predicts token t+2 with its head. A second depth joins that with the embedding of token t+2 and predicts t+3.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from support.engine import Batch, Zoo, packed_batch, padded_batch
from support.rows import text_examples, vision_examples
from support.tiny import experts_apart, load_plain
from support.tiny_qwen3_next import write_tiny_qwen3_next
from support.tiny_qwen35 import write_tiny_qwen35, write_tiny_qwen35_text
from torch import Tensor

WEIGHT = 0.4
GRADIENTS = 2e-5  # relative to a tensor's norm; measured 7e-6, as without MTP


@dataclass(frozen=True)
class Pair:
    zoo: Zoo
    samples: list[Any]
    labels: int
    nll: float  # of the decoder's labels
    further: float  # of the MTP layer's
    gradients: dict[str, Tensor]  # by published names


@contextmanager
def seen(decoder: Any) -> Iterator[dict[str, Tensor]]:
    """What goes into transformers' decoder and comes out of it while this is open."""
    found: dict[str, Tensor] = {}

    def note(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        embeds = kwargs["inputs_embeds"]
        found["embeds"] = module.embed_tokens(kwargs["input_ids"]) if embeds is None else embeds
        found.update(positions=kwargs["position_ids"], hidden=output.last_hidden_state)

    handle = decoder.register_forward_hook(note, with_kwargs=True)
    yield found
    handle.remove()


def decoder_of(hf: Any) -> Any:
    """transformers' decoder without its head."""
    return getattr(hf.model, "language_model", hf.model)


def mtp_layer(decoder: Any, tensors: dict[str, Tensor], index: int) -> tuple[Any, dict[str, Tensor]]:
    """transformers' decoder layer with full attention, and the parameters out of `tensors` to call it with."""
    config = copy.deepcopy(decoder.config)
    config.layer_types = ["full_attention"]
    layer = type(decoder.layers[0])(config, 0)
    prefix = f"mtp.layers.{index}."
    own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    experts = getattr(config, "num_experts", 0)
    if experts:
        parts = {
            part: [own.pop(f"mlp.experts.{e}.{part}_proj.weight") for e in range(experts)]
            for part in ("gate", "up", "down")
        }
        gate_up = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        own["mlp.experts.gate_up_proj"] = torch.stack(gate_up)
        own["mlp.experts.down_proj"] = torch.stack(parts["down"])
    return layer, own


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1.0 + weight)


def reference(hf: Any, tensors: dict[str, Tensor], example: Any, depths: int) -> tuple[Tensor, Tensor]:
    """(decoder's, mean over the MTP layers') sum of negative log likelihoods of one sample."""
    decoder = decoder_of(hf)
    eps = decoder.config.rms_norm_eps
    with seen(decoder) as found:
        logits = hf(**example.features).logits[0]
    labels = example.sample.labels
    nll = F.cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum")
    positions = found["positions"]
    if positions is None:  # text alone
        axes = (3, 1) if "mrope_section" in decoder.config.rope_parameters else (1,)
        positions = torch.arange(len(labels)).expand(*axes, -1)
    hidden, further = found["hidden"], nll * 0.0
    for depth in range(1, depths + 1):
        length = len(labels) - depth  # tokens t that have a token t + depth
        if length < 2:
            break
        embedded = norm(found["embeds"][:, depth:], tensors["mtp.pre_fc_norm_embedding.weight"], eps)
        before = norm(hidden[:, :length], tensors["mtp.pre_fc_norm_hidden.weight"], eps)
        joined = torch.cat((embedded, before), dim=-1) @ tensors["mtp.fc.weight"].T
        angles = decoder.rotary_emb(joined, positions[-3:, ..., :length])
        layer, own = mtp_layer(decoder, tensors, depth - 1)
        mask = torch.full((length, length), torch.finfo(joined.dtype).min).triu(1)[None, None]
        out = torch.func.functional_call(layer, own, (joined,), {"position_embeddings": angles, "attention_mask": mask})
        hidden = norm(out[0] if isinstance(out, tuple) else out, tensors["mtp.norm.weight"], eps)
        scores = hidden[0] @ hf.lm_head.weight.T
        further = further + F.cross_entropy(scores[:-1], labels[depth + 1 :], ignore_index=-100, reduction="sum")
    return nll, further / depths


KINDS = {
    "dense": ("qwen35_vl", partial(write_tiny_qwen35, moe=False), vision_examples, dict, 1),
    "experts, two deep": ("qwen35_vl", partial(write_tiny_qwen35, moe=True), vision_examples, dict, 2),
    "experts": ("qwen35_vl", partial(write_tiny_qwen35, moe=True), vision_examples, dict, 1),
    "qwen3.5 as text": ("qwen35_text", partial(write_tiny_qwen35_text, moe=True), text_examples, experts_apart, 2),
    "qwen3_next": ("qwen3_next", write_tiny_qwen3_next, text_examples, experts_apart, 1),
    "qwen3_next, three deep": (
        "qwen3_next",
        partial(write_tiny_qwen3_next, num_nextn_predict_layers=3),
        text_examples,
        experts_apart,
        3,
    ),
}


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cpu_world: Any) -> Pair:
    family, write, rows, publish, depths = KINDS[request.param]
    folder: Path = write(tmp_path_factory.mktemp("tiny_mtp"), mtp=depths)
    zoo = Zoo.load(folder, cpu_world, f"model.family={family}", f"train.mtp_loss={WEIGHT}")
    hf = load_plain(folder)
    stored = load_file(folder / "model.safetensors")
    tensors = {name: t.requires_grad_() for name, t in stored.items() if name.startswith("mtp.")}
    examples = rows(zoo.assembly.processor)
    count = sum(example.sample.num_labels for example in examples.values())
    sums = [0.0, 0.0]
    for example in examples.values():
        both = reference(hf, tensors, example, depths)
        ((both[0] + WEIGHT * both[1]) / count).backward()
        sums = [total + float(one.detach()) for total, one in zip(sums, both, strict=True)]
    parameters = [*hf.named_parameters(), *tensors.items()]
    gradients = publish({name: p.grad for name, p in parameters if p.grad is not None})
    samples = [example.sample for example in examples.values()]
    return Pair(zoo, samples, count, *sums, gradients)


LAYOUTS = {
    "one by one": lambda samples: ([packed_batch([sample]) for sample in samples], {}),
    "packed": lambda samples: ([packed_batch(samples)], {}),
    "packed, aligned": lambda samples: ([packed_batch(samples)], {"align": 8}),
    "pad_to": lambda samples: ([packed_batch(samples)], {"align": 2, "pad_to": 1024}),
    "padded, to be packed": lambda samples: ([padded_batch(samples, "mixed")], {"align": 4}),
    "padded": lambda samples: ([padded_batch(samples, "mixed", extra=3)], {"mode": "none"}),
}


@pytest.mark.sampled(13)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_multi_token_prediction(layout: str, pair: Pair) -> None:
    batches, packing = LAYOUTS[layout](pair.samples)
    loss, gradients = pair.zoo.gradients(batches, pair.labels, **packing)
    assert pair.further > 0.2 * pair.nll, "it weighs enough to be seen"
    assert loss * pair.labels == pytest.approx(pair.nll + WEIGHT * pair.further, rel=1e-6)
    found = pair.zoo.published(gradients)
    assert set(found) == set(pair.gradients)
    errors = {name: float((found[name] - want).norm() / want.norm()) for name, want in pair.gradients.items()}
    assert not {name: error for name, error in errors.items() if not error < GRADIENTS}


@pytest.mark.sampled(2)
def test_metrics_of_both_losses(pair: Pair) -> None:
    step = pair.zoo.step()
    output, loss_function = step(iter([packed_batch(pair.samples)]), pair.zoo.model, loss_scale=1.0)
    metrics = loss_function(output)[1]
    assert float(metrics["nll"]) == pytest.approx(pair.nll, rel=1e-6)
    assert float(metrics["mtp_nll"]) == pytest.approx(pair.further, rel=1e-6)
    assert float(metrics["labels"]) == pair.labels


@pytest.mark.parametrize("packing", [{}, {"align": 4}, {"mode": "none"}], ids=["packed", "aligned", "padded"])
@pytest.mark.parametrize("lengths", [(1,), (1, 1, 1), (2, 1)], ids=str)
def test_samples_that_have_no_token_to_look_ahead_to(
    lengths: tuple[int, ...], packing: dict[str, Any], short: Zoo
) -> None:
    """Layers of experts that get no token at all add nothing to the load-balancing losses, and no NaN."""
    ids = torch.arange(5, 5 + sum(lengths))[None]
    batch = Batch(ids, ids, None, lengths, {})
    loss, gradients = short.gradients([batch], 1, **packing)
    assert (loss > 0) == (max(lengths) > 1)
    there = {name: grad for name, grad in gradients.items() if grad is not None}
    assert not [name for name, grad in there.items() if not bool(grad.isfinite().all())]
    assert float(there["decoder.layers.0.mlp.router.weight"].norm()) > 0, "the decoder's layers have tokens"


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory, cpu_world: Any) -> Zoo:
    folder = write_tiny_qwen35(tmp_path_factory.mktemp("short"), moe=True, mtp=2)
    losses = ("train.mtp_loss=0.4", "train.aux_loss=0.1", "train.z_loss=0.1")
    return Zoo.load(folder, cpu_world, "model.family=qwen35_vl", *losses)
