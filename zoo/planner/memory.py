"""Bytes of a rank by kind, for every pipeline stage: weights, gradients, optimizer, activations.

Gradients are kept in fp32 or bf16; AdamW's two moments or Muon's one, and under bf16 the 16 bits that complete a weight to fp32, are shared out
over data-parallel ranks (Megatron-Core's distributed optimizer). Activations are those of the micro-batches in flight, and
what the widest moment of the backward pass needs beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING

from zoo.config.derived import trains_thinker
from zoo.config.schema import Recipe
from zoo.nn.decoder.frozen.modules import FORMATS
from zoo.packing.cost import TALKER, LayerKind, ModelCost, TowerCost
from zoo.planner.activations import FP32, Row, SavedActivations, layers_bytes, rows_of_step
from zoo.planner.parameters import ParameterStatistics, Share, Weights, layers_of, share
from zoo.planner.rollouts import has_frozen_copy, rollout_bytes
from zoo.planner.vllm import beside_vllm, vllm_bytes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MOMENT = {"fp32": 4.0, "bf16": 2.0, "fp8": 1 + 1 / 128}  # bytes a weight
HOST_PROCESS = 6e9  # bytes that a rank's libraries take of the host's memory beside a GPU, by rule of thumb
SAVED_MOMENT = {"fp32": 4, "bf16": 2, "fp8": 2}  # the same in a checkpoint
# Bytes that captured layers and the rest of a step can't share: 2.6 to 4.6 GiB in runs of Qwen3.5-VL 2B.
GRAPHS = 3 * 2**30


@dataclass(frozen=True)
class TalkerModel:
    """What a plan knows of a talker beside its parameters and FLOPs."""

    text: PretrainedConfig  # of its decoder
    traits: Sequence[str]
    kinds: Sequence[LayerKind]  # of each of its layers
    residual: PretrainedConfig | None  # of the decoder of residual codes
    residual_kinds: Sequence[LayerKind]
    codebooks: int
    projected: int  # numbers that its projections keep of a token
    accepted: int  # layers of the thinker before what it reads


@dataclass(frozen=True)
class Model:
    """The numbers of a model that a plan is made from."""

    parameters: ParameterStatistics
    cost: ModelCost
    text: PretrainedConfig  # or its attributes; what a config lacks is None
    traits: Sequence[str]
    kinds: Sequence[LayerKind]  # of each decoder layer
    deepstack: int = 0  # layers that features of the vision tower are added after
    mtp: int = 0  # layers of multi-token prediction
    teacher: ParameterStatistics | None = (
        None  # of a model beside it, which is not trained: a teacher or a reward model
    )
    talker: TalkerModel | None = None  # where it is trained

    @cached_property
    def trained_parts(self) -> frozenset[str]:
        """Parts of the model that have weights that are trained."""
        return frozenset(weights.part for weights in self.parameters.weights if weights.trained)


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    `weights` are those of a teacher, a reward model and a frozen copy, too; `activations` stand for the cache of answers that are sampled
    where that is larger, as both are never in memory at once.
    """

    weights: float
    grads: float
    optimizer: float
    activations: float
    host: float = 0.0  # optimizer state in CPU memory

    @property
    def total(self) -> float:
        """GPU memory of all kinds; the part in CPU memory is not counted."""
        return self.weights + self.grads + self.optimizer + self.activations

    def as_dict(self) -> dict[str, float]:
        """Bytes by kind, with the total."""
        return {kind: getattr(self, kind) for kind in ("weights", "grads", "optimizer", "activations", "total")}


def memory(model: Model, recipe: Recipe, row: Row, ranks: int, *, fused: bool) -> list[Memory]:
    """Bytes of a rank of each pipeline stage.

    Args:
        recipe: validated for `ranks`.
        row: what a micro-batch brings.
        fused: with the kernels of a GPU.
    """
    apart = GRAPHS if fused and recipe.engine.cuda_graphs else 0.0
    rollout = rollout_bytes(model.text, model.kinds, recipe, row, ranks)
    return [
        _stage_memory(model, recipe, stage, ranks, max(activations, rollout) + apart)
        for stage, activations in enumerate(_activations(model, recipe, row, ranks, fused))
    ]


def _stage_memory(model: Model, recipe: Recipe, stage: int, ranks: int, activations: float) -> Memory:
    weights, grads, state = _state(model, recipe, stage, ranks)
    stage_share, size = share(model.parameters, recipe, stage), 2.0 if recipe.engine.precision == "bf16" else 4.0
    activations += max(  # dense weights where a rank holds codes: a layer's, or all before anything else is in memory
        stage_share.widest * size,
        stage_share.quantised * (size - held_bytes(recipe)) - (grads + state + activations)
        if _read_dense(recipe)
        else 0.0,
    )
    host = state * recipe.train.optimizer_offload_fraction
    activations = beside_vllm(activations, grads + state - host, recipe)
    return Memory(weights, grads, state - host, activations, host)


def _read_dense(recipe: Recipe) -> bool:
    """Whether weights that `lora.base_dtype` holds are known to be loaded whole before they are quantised."""
    return recipe.lora.merge_first is not None or "quantization_config" in recipe.model.arch


def host_bytes(model: Model, recipe: Recipe, ranks: int, row: Row) -> float:
    """Most bytes of CPU memory that a rank on a GPU uses: optimizer state, inputs of layers, a save's pinned copy, the process, samples."""
    state = max(_state(model, recipe, stage, ranks)[2] for stage in range(recipe.parallel.pp))
    samples = (recipe.data.cache_mb + recipe.data.ahead_mb) * 2**20
    saved = checkpoint_bytes(model, recipe) / ranks
    away = 1.0 if vllm_bytes(recipe) and recipe.rl.vllm.sleep else recipe.train.optimizer_offload_fraction
    micro_batches = _micro_batches(recipe, row, ranks)
    inputs = max(
        in_flight(recipe, stage, micro_batches) * inputs_on_host(model, recipe, row, stage)
        for stage in range(recipe.parallel.pp)
    )
    if pipelined_towers(recipe):  # those of a whole step
        kept = SavedActivations(recipe, model.text, model.traits, row, True)
        inputs += micro_batches * kept.on_host(0, _trained_towers(kept, model)) / recipe.parallel.pp
    return state * away + inputs + saved + HOST_PROCESS + samples


def inputs_on_host(model: Model, recipe: Recipe, row: Row, stage: int) -> float:
    """Bytes of inputs of layers, of one row, in the CPU memory of a stage's rank."""
    kept = SavedActivations(recipe, model.text, model.traits, row, True)
    is_last, inputs = stage == recipe.parallel.pp - 1, 0.0
    if model.talker is None or trains_thinker(recipe):
        layers = len(layers_of(recipe, len(model.kinds), stage)) + (model.mtp if is_last else 0)
        encodes = stage == 0 and not pipelined_towers(recipe)
        inputs = kept.on_host(layers, _trained_towers(kept, model) if encodes else {})
    if model.talker is not None and is_last:
        spoken = _spoken_row(model.cost, row)
        talker = SavedActivations(recipe, model.talker.text, model.talker.traits, spoken, True, TALKER)
        inputs += talker.on_host(len(model.talker.kinds), {})
    return inputs


def least_bytes(model: Model, recipe: Recipe, ranks: int) -> float:
    """Bytes of the rank with most of weights, gradients and optimizer state: the least it needs."""
    return max(_stage_memory(model, recipe, stage, ranks, 0.0).total for stage in range(recipe.parallel.pp))


def checkpoint_bytes(model: Model, recipe: Recipe) -> int:
    """Bytes of a checkpoint, of all ranks: weights, or adapters alone, and the optimizer state of trained ones, 8-bit moments as bf16."""
    parameters, half, train = model.parameters, recipe.engine.precision == "bf16", recipe.train
    weights = (parameters.trained if recipe.lora.rank else parameters.total) * (2 if half else 4)
    if train.save == "weights":
        return weights
    first, second = SAVED_MOMENT[train.exp_avg_dtype], SAVED_MOMENT[train.exp_avg_sq_dtype]
    without_second = parameters.trained_matrices if train.optimizer == "muon" else 0
    return weights + parameters.trained * (first + second + (2 if half else 0)) - without_second * second


def export_bytes(model: Model, recipe: Recipe) -> int:
    """Bytes of what a run exports at its end; 0 where it doesn't."""
    if not recipe.export:
        return 0
    kept = model.parameters.trained if recipe.lora.rank else model.parameters.total
    return kept * (2 if recipe.engine.precision == "bf16" else 4)


def remainder_bytes(model: Model, recipe: Recipe, stage: int, ranks: int) -> float:
    """Bytes of what completes bf16 weights to fp32, on a rank of a stage."""
    return 2 * sum(_held(share(model.parameters, recipe, stage), recipe, ranks)[:2])


def held_bytes(recipe: Recipe) -> float:
    """Bytes of a weight that is held in `lora.base_dtype`, with its blocks' scales."""
    return FORMATS[recipe.lora.base_dtype].bytes_each if recipe.lora.base_dtype in FORMATS else 0.0


def _held(stage_share: Share, recipe: Recipe, ranks: int) -> tuple[float, float, float]:
    """Trained weights whose optimizer state a rank holds: dense ones, experts, and matrices among both."""
    parallel = recipe.parallel
    replicas = ranks / (parallel.tp * parallel.pp)  # the ranks that share out a dense weight's state
    expert_replicas = ranks / (parallel.etp * parallel.ep * parallel.pp)
    matrices = stage_share.dense_matrices / replicas + stage_share.experts_matrices / expert_replicas
    return (
        (stage_share.trained_dense - stage_share.copied) / replicas,
        stage_share.trained_experts / expert_replicas,
        matrices,
    )


def _state(model: Model, recipe: Recipe, stage: int, ranks: int) -> tuple[float, float, float]:
    """(weights, gradients, optimizer) of a stage's rank, in bytes; a teacher is cut as the student, its layers evenly."""
    half, train, stage_share = recipe.engine.precision == "bf16", recipe.train, share(model.parameters, recipe, stage)
    size = 2.0 if half else 4.0
    weights = (stage_share.dense + stage_share.experts) * size - stage_share.quantised * (size - held_bytes(recipe))
    if train.reference == "base":  # what is trained whole beside adapters, as it was at first
        weights += stage_share.trained_whole * size
    if has_frozen_copy(recipe):
        weights += (stage_share.dense + stage_share.experts) * size
    if model.teacher is not None:
        taught = share(model.teacher, replace(recipe, parallel=replace(recipe.parallel, stage_layers=[])), stage)
        weights += (taught.dense + taught.experts) * size - taught.quantised * (size - held_bytes(recipe))
    copied, copied_grads = _tower_copy(model, recipe, stage)
    dense, experts, matrices = _held(stage_share, recipe, ranks)
    first, second = MOMENT[train.exp_avg_dtype], MOMENT[train.exp_avg_sq_dtype]
    with_second = dense + experts - (matrices if train.optimizer == "muon" else 0.0)
    trained = stage_share.trained_dense + stage_share.trained_experts
    grads = trained * (2.0 if train.main_grads_dtype == "bf16" else float(FP32))
    state = (dense + experts) * (first + (2 if half else 0)) + with_second * second
    return weights + copied * size, grads + copied_grads * size, state


def pipelined_towers(recipe: Recipe) -> bool:
    """Whether the stages of a pipeline share the work of towers."""
    return recipe.parallel.towers == "shared" and recipe.parallel.pp > 1


def _tower_copy(model: Model, recipe: Recipe, stage: int) -> tuple[int, int]:
    """(weights, trained ones among them) of the copy of the first stage's towers on another stage that shares their work."""
    if stage == 0 or not pipelined_towers(recipe):
        return 0, 0
    copied = tower_weights(model)
    return sum(weights.count for weights in copied), sum(weights.count for weights in copied if weights.trained)


def tower_weights(model: Model) -> list[Weights]:
    """Those of the model's towers, with adapters beside them."""
    return [
        weights for weights in model.parameters.weights if weights.position == "first" and weights.part != "embedding"
    ]


def _activations(model: Model, recipe: Recipe, row: Row, ranks: int, fused: bool) -> list[float]:
    """Bytes of activations at the widest moment, by stage."""
    parallel = recipe.parallel
    kept = SavedActivations(recipe, model.text, model.traits, row, fused)
    micro_batches = _micro_batches(recipe, row, ranks)
    by_stage = []
    for stage in range(parallel.pp):
        layers = [model.kinds[layer] for layer in layers_of(recipe, len(model.kinds), stage)]
        head = loss = 0.0
        if stage == parallel.pp - 1:
            layers += [LayerKind(False, model.kinds[-1].sparse)] * model.mtp
            head, loss = (value * (1 + model.mtp) for value in kept.head())
        stored, recomputed = layers_bytes(kept, layers, recipe.engine.recompute)
        first, towers = _first(kept, model) if stage == 0 else (0.0, 0.0)
        whole_step, last = _step_towers(kept, model, micro_batches, stage)
        if model.talker is not None and not trains_thinker(recipe):  # nothing is kept but what a layer works on
            towers = _unkept(kept, layers, model.cost.towers if stage == 0 else {})  # gone when the talker begins
            stored = first = head = loss = recomputed = 0.0
        if model.talker is not None and stage:  # what it reads comes through: embeddings, and at most a state with each
            spoken_tokens = SavedActivations(recipe, model.text, (), _spoken_row(model.cost, row), fused).tokens
            stored += 2 * spoken_tokens * model.text.hidden_size * kept.size
        if model.talker is not None and stage == parallel.pp - 1:
            spoken, further = _talker_bytes(model, model.talker, recipe, row, fused=fused)
            head, loss = head + spoken, max(loss, further)
        # The backward pass comes to the towers when it has left the decoder.
        widest = max(stored + head + max(recomputed, loss), towers)
        schedule = (in_flight(recipe, stage, micro_batches) - 1) * (stored + first) + first + widest
        by_stage.append(whole_step + max(schedule, last))
    return by_stage


def _micro_batches(recipe: Recipe, row: Row, ranks: int) -> int:
    """Rows of a step that each replica of the model works on."""
    parallel = recipe.parallel
    return max(1, int(rows_of_step(recipe, row) * parallel.tp * parallel.pp * parallel.cp // ranks))


def in_flight(recipe: Recipe, stage: int, micro_batches: int) -> float:
    """Micro-batches whose activations a stage holds at once; fractions are of a stage's layers, when interleaved."""
    pp, vpp = recipe.parallel.pp, recipe.parallel.vpp
    if pp == 1:
        return 1.0
    if vpp == 1:
        return float(min(micro_batches, pp - stage))
    chunks = (pp - stage - 1) * 2 + (vpp - 1) * pp + 1
    return min(micro_batches * vpp, chunks) / vpp


def _trained_towers(kept: SavedActivations, model: Model) -> dict[str, TowerCost]:
    """Towers by name that keep something: those of the row's media with weights or adapters that are trained."""
    trained = model.trained_parts | (set(kept.recipe.lora.parts) if kept.recipe.lora.rank else set())
    return {name: cost for name, cost in model.cost.towers.items() if kept.row.media.get(name) and name in trained}


def _first(kept: SavedActivations, model: Model) -> tuple[float, float]:
    """(bytes that embedding and towers keep, further bytes in the towers' backward pass) of a micro-batch on the first stage."""
    stored = kept.tokens * 8 * (1 + model.mtp) + kept.deepstack(model.deepstack)
    if pipelined_towers(kept.recipe):
        return stored, 0.0
    towers = [kept.tower(cost, name) for name, cost in _trained_towers(kept, model).items()]
    if kept.recipe.parallel.towers == "shared":
        stored += _embedding_bytes(kept, model)
    return stored + sum(stored for stored, _ in towers), max((widest for _, widest in towers), default=0.0)


def _step_towers(kept: SavedActivations, model: Model, micro_batches: int, stage: int) -> tuple[float, float]:
    """(bytes kept, further bytes in the backward pass) of towers whose work on a step is dealt over a pipeline's stages."""
    parallel = kept.recipe.parallel
    if not pipelined_towers(kept.recipe):
        return 0.0, 0.0
    towers = [kept.tower(cost, name) for name, cost in _trained_towers(kept, model).items()]
    readers = 1 if stage == 0 else parallel.pp * parallel.tp * parallel.cp
    stored = sum(stored for stored, _ in towers) / parallel.pp + _embedding_bytes(kept, model) / readers
    return micro_batches * stored, max((micro_batches * widest / parallel.pp for _, widest in towers), default=0.0)


def _embedding_bytes(kept: SavedActivations, model: Model) -> float:
    """Bytes of a row's embeddings of media, which the ranks that encode send to those that read, and of their gradients, sent back."""
    return 2 * kept.row.media_tokens(model.cost.towers) * model.text.hidden_size * (1 + model.deepstack) * kept.size


def _unkept(kept: SavedActivations, layers: Sequence[LayerKind], towers: Mapping[str, TowerCost]) -> float:
    """Bytes at the widest moment of a forward pass that keeps nothing."""
    each, items = kept.size / (kept.recipe.parallel.tp * kept.recipe.parallel.cp), kept.row.items
    widest = [tower.unkept * items[name].padded(tower.piece) * each for name, tower in towers.items() if name in items]
    return max((*widest, *(max(kept.layer(kind)) for kind in set(layers))), default=0.0)


def _talker_bytes(model: Model, talker: TalkerModel, recipe: Recipe, row: Row, *, fused: bool) -> tuple[float, float]:
    """(bytes kept, further bytes at the widest moment) of a rank, for a row that is spoken."""
    kept = SavedActivations(recipe, talker.text, talker.traits, _spoken_row(model.cost, row), fused, TALKER)
    stored, recomputed = layers_bytes(kept, talker.kinds, recipe.engine.recompute)
    head, loss = kept.head()
    # States of media go through a projection of their own, beside the embeddings of all tokens.
    media = row.media_tokens(model.cost.towers)
    stored += (kept.tokens + media / recipe.parallel.cp) * talker.projected * kept.size + head
    if trains_thinker(recipe):  # whose states and embeddings come with a gradient
        recomputed = max(recomputed, (kept.tokens + row.total) * model.text.hidden_size * kept.size)
    if talker.residual is None:
        return stored, max(recomputed, loss)
    # Each rank has its frames whole, whatever shares tokens and experts out.
    alone = replace(recipe, parallel=replace(recipe.parallel, cp=1, ep=1, etp=1, sp=False))
    of_frames = _frames(-(-sum(_speech_frames(row)) // recipe.parallel.cp), talker.codebooks)
    predictor = SavedActivations(alone, talker.residual, ("qk_norm",), of_frames, fused, TALKER)
    more, again = layers_bytes(predictor, talker.residual_kinds, recipe.engine.recompute)
    head, loss = predictor.head()
    logits = of_frames.labels * talker.residual.vocab_size / recipe.parallel.tp * predictor.size
    return stored + more + head, max(recomputed, again, loss + logits)


def _speech_frames(row: Row) -> list[int]:
    """Frames of speech of each sample."""
    return [int(number) for number in row.media.get(TALKER, ())]


def _spoken_row(cost: ModelCost, row: Row) -> Row:
    """The talker's row for a row of the thinker's."""
    assert cost.talker is not None
    frames = _speech_frames(row)
    return Row(tuple(cost.talker.tokens(row.lengths, row.labels, frames)), sum(frames) + len(frames), {})


@cache
def _frames(count: int, codebooks: int) -> Row:
    """A row of frames by themselves, each a token for each codebook: all but the first predict a code."""
    return Row((codebooks,) * count, count * (codebooks - 1), {})
