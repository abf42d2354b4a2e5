"""What stands in padded slots changes nothing, on any rank or stage; router statistics are those of one rank.

One micro-batch of rows of every kind, each padded to a multiple of 8, with both auxiliary losses large enough to rule
the router's gradient. Under zigzag all padding of a segment lies on the first context-parallel ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support.engine import Batch, packed_batch, padded_batch, recipe_for
from support.gathered import LIMIT, full_gradients, total_loss, worst
from support.matrix import MODELS, Model
from support.pool import Pool
from support.rank_gradients import Held, Plan, run_step
from torch import Tensor

from zoo.packing import PackedLayout

NAMES = {
    "omni": ("image-long", "audio-short", "text-short", "turns", "video-short", "image+video+audio"),
    "mtp": ("image-long", "text-short", "turns", "video-short", "image+video"),
    "sigmoid": ("image-long", "text-short", "turns", "video-short", "image+video"),
}
SLOW = {"sigmoid"}  # of these
ALIGN = 8
AUXILIARY = ("train.aux_loss=0.5", "train.z_loss=0.1")
# Balancing by a bias on the router's choice, which megatron-core has for sigmoid scores alone.
BIAS = {
    "mtp": (
        ("moe_router_score_function", "sigmoid"),
        ("moe_router_enable_expert_bias", True),
        ("moe_router_bias_update_rate", 0.01),
    )
}
PARALLEL = {
    "cp2": (2, ("parallel.cp=2",)),
    "tp2": (2, ("parallel.tp=2",)),
    "pp2": (2, ("parallel.pp=2",)),
    "tp2 cp2": (4, ("parallel.tp=2", "parallel.cp=2")),
    "tp2 pp2": (4, ("parallel.tp=2", "parallel.pp=2")),
    "cp2 ep2": (2, ("parallel.cp=2", "parallel.ep=2")),
}


@dataclass
class Prepared:
    """A model, its rows, and what one rank makes of one packed row without a single padding token."""

    model: Model
    folder: str
    ids: list[int]  # to poison with: placeholders and start tokens of media
    vocabulary: int
    rows: list[Any]
    transformer: tuple[tuple[str, Any], ...]
    clean: list[Held]

    @property
    def labels(self) -> int:
        return sum(row.num_labels for row in self.rows)

    def plan(self, batches: str, overrides: tuple[str, ...]) -> Plan:
        return Plan(
            folder=self.folder,
            batches=batches,
            labels=self.labels,
            overrides=(*self.model.overrides, *overrides),
            recipe=self.model.recipe,
            transformer=self.transformer,
        )


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in NAMES]
)
def prepared(
    request: pytest.FixtureRequest,
    pool: Pool,
    tmp_path_factory: pytest.TempPathFactory,
    store: Callable[[list[Batch]], str],
) -> Prepared:
    from zoo.model.build import assemble

    name = request.param
    model, root = MODELS[name], tmp_path_factory.mktemp(f"padding_{name}")
    folder = str(model.write(root / "checkpoint"))
    assembly = assemble(recipe_for(folder, recipe=model.recipe))
    hf = getattr(assembly.config.hf, "thinker_config", assembly.config.hf)
    kinds = ("image", "video", "audio", "vision_start", "audio_start", "video_start", "video_end")
    ids = [getattr(hf, f"{kind}_token_id") for kind in kinds if hasattr(hf, f"{kind}_token_id")]
    examples = model.examples(assembly.processor)
    rows = [examples[row].sample for row in NAMES[name]]
    made = Prepared(model, folder, ids, hf.text_config.vocab_size, rows, BIAS.get(name, ()), clean=[])
    made.clean = pool.run(1, run_step, made.plan(store([packed_batch(rows)]), AUXILIARY))
    return made


def poison(prepared: Prepared, ids: Tensor, slots: Tensor, seed: int) -> Tensor:
    """Random token ids, placeholders and start tokens of media among them, in `slots`."""
    generator = torch.Generator().manual_seed(seed)
    choice = torch.cat((torch.arange(prepared.vocabulary), torch.tensor(prepared.ids).repeat(40)))
    return torch.where(slots, choice[torch.randint(len(choice), ids.shape, generator=generator)], ids)


def poisoned(prepared: Prepared, mode: str) -> Batch:
    """The samples in a row or side by side, with poison for ids and labels in all padding."""
    samples = prepared.rows
    if mode == "none":
        batch = padded_batch(samples, "mixed", extra=5)
        assert batch.attention_mask is not None
        padding = batch.attention_mask == 0
    else:
        batch = packed_batch(samples)
        layout = PackedLayout.from_lengths(batch.lengths, ALIGN)
        padding = layout.padding_mask
        ids = layout.pack_list([sample.input_ids for sample in samples])
        batch = replace(batch, input_ids=ids, labels=layout.pack_list([sample.labels for sample in samples], -100))
    assert float(padding.float().mean()) > 0.03
    assert batch.labels is not None
    ids, labels = (poison(prepared, x, padding, i) for i, x in enumerate((batch.input_ids, batch.labels)))
    return replace(batch, input_ids=ids, labels=labels)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("mode", ["thd", "none"])
@pytest.mark.parametrize("parallel", PARALLEL)
def test_poisoned_padding(
    parallel: str,
    mode: str,
    pool: Pool,
    prepared: Prepared,
    store: Callable[[list[Batch]], str],
    record_property: Callable[[str, object], None],
) -> None:
    size, overrides = PARALLEL[parallel]
    overrides = (*overrides, *AUXILIARY, f"packing.align={ALIGN}", f"packing.mode={mode}")
    held = pool.run(size, run_step, prepared.plan(store([poisoned(prepared, mode)]), overrides))
    clean = prepared.clean
    error = abs(total_loss(held) - total_loss(clean)) / total_loss(clean)
    largest, name = worst(full_gradients(held), full_gradients(clean))
    record_property("loss_error", f"{error:.1e}")
    record_property("gradient_error", f"{largest:.1e} {name}")
    assert set(clean[0].metrics) == {"load_balancing_loss", "z_loss"}
    for metric, wanted in clean[0].metrics.items():
        for part in held:
            torch.testing.assert_close(part.metrics[metric], wanted, rtol=1e-6, atol=0)
    for part in held:
        for layer, bias in part.biases.items():
            torch.testing.assert_close(
                bias, clean[0].biases[layer], rtol=0, atol=0, msg=f"expert bias of layer {layer}: {{}}".format
            )
    assert {layer for part in held for layer in part.biases} == set(clean[0].biases)
    assert error < LIMIT
    assert largest < LIMIT, name


def test_what_is_compared_is_there(prepared: Prepared) -> None:
    """Every MoE layer has both losses, those of multi-token prediction too, and where it is on a bias that moved."""
    # Routed layers of the tiny models: a dense layer has no router; 4 layers and one of MTP, or two.
    layers = {"qwen3_omni_sft": 3, "glm45v_sft": 3}.get(prepared.model.recipe, 5)
    layers += prepared.model is MODELS["mtp"]
    for wanted in prepared.clean[0].metrics.values():
        assert int((wanted > 0).sum()) == layers
    biases = prepared.clean[0].biases
    assert len(biases) == (layers if prepared.transformer or prepared.model is MODELS["sigmoid"] else 0)
    assert all(bool(bias.abs().sum() > 0) for bias in biases.values())


def test_auxiliary_losses_rule_the_gradient(
    pool: Pool, prepared: Prepared, store: Callable[[list[Batch]], str]
) -> None:
    """What the tests above compare does depend on both."""
    batches = store([packed_batch(prepared.rows)])
    both = full_gradients(prepared.clean)
    routers = [name for name in both if name.endswith("router.weight")]
    for kept in AUXILIARY:
        other = full_gradients(pool.run(1, run_step, prepared.plan(batches, (kept,))))
        for name in routers:
            assert float((other[name] - both[name]).norm()) > 0.02 * float(both[name].norm()), name


def test_prompt_tokens_are_routed_and_counted(
    pool: Pool, prepared: Prepared, store: Callable[[list[Batch]], str]
) -> None:
    """Tokens without a label weigh in the router's statistics as those with one: the padding mask is not their labels'."""
    batch = packed_batch(prepared.rows)
    assert batch.labels is not None
    fewer = batch.labels.clone()
    labelled = (fewer != -100).nonzero()
    fewer[tuple(labelled[::2].T)] = -100
    plans = [prepared.plan(store([replace(batch, labels=labels)]), AUXILIARY) for labels in (batch.labels, fewer)]
    every, half = (pool.run(1, run_step, plan)[0] for plan in plans)
    for metric, wanted in every.metrics.items():
        torch.testing.assert_close(half.metrics[metric], wanted, rtol=0, atol=0, msg=f"{metric}: {{}}".format)
    for layer, bias in every.biases.items():
        torch.testing.assert_close(half.biases[layer], bias, rtol=0, atol=0)
    prompt = prepared.plan(store([_without_prompt(prepared)]), AUXILIARY)
    answers = pool.run(1, run_step, prompt)[0]
    assert not torch.allclose(answers.metrics["load_balancing_loss"], every.metrics["load_balancing_loss"], rtol=1e-3)


def _without_prompt(prepared: Prepared) -> Batch:
    """The labelled tokens alone, as if the rest had been left out."""
    kept = [sample.input_ids[sample.labels != -100] for sample in prepared.rows]
    return Batch(torch.cat(kept)[None], torch.cat(kept)[None], None, tuple(map(len, kept)), {})
