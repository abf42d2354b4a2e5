"""Seconds of a row under a layout: rough, but on the scale that measurements gave, to rank layouts by.

Computing takes the FLOPs at `BUSY` of the GPU's peak. What a layout adds is set by runs in docs/benchmarks on H200s:

    experts    a rank with few tokens an expert multiplies narrow matrices: the experts' FLOPs take 1 + FEW / tokens times as
               long (30B-A3B under EP 1 to EP 4, with 1,000 to 4,100 tokens an expert)
    ep         each token goes to the ranks of its experts and back, forward and backward, and once more under full recompute, at
               `EXCHANGE` bytes a second, waits for other ranks included (adapters of 30B-A3B under EP 2 and EP 4). An exchange of the
               backward pass that runs beside products takes no time
    tp, cp     a share of the computing for each doubling, less for wider models (2B, rows of 32,768: CP 2, TP 2 x CP 2)
    towers     where ranks share their work, they wait less, by `UNEVEN` of the towers' computing, and send embeddings of `MOVED` of the media and
               their gradients at `EXCHANGE` (simulated: rows of zoo bench balance dealt to 8 and 64 ranks)
    pp         the bubble, the slowest stage, and `PP` for rows that differ (not measured)
    weights    each that a rank holds is read in every pass, at `READ` bytes a second

Recompute is in the FLOPs. Beyond a node exchanges take place at `NETWORK` bytes a second.
"""

from __future__ import annotations

from math import log2

from zoo.config.derived import data_parallel, stage_layers, trains_thinker
from zoo.config.gpus import find_gpu
from zoo.config.schema import Recipe
from zoo.packing.cost import TALKER, train_factor
from zoo.planner.activations import FP32, Row, labels_in_chunks, mlp_in_chunks, rows_of_step, rows_sent
from zoo.planner.memory import Model, pipelined_towers, tower_weights
from zoo.planner.parameters import share

PEAK = 989.5e12  # FLOP/s of a GPU of which only the memory is known
BUSY = 0.47  # share of the peak without any cut (h200-row-1gpu)
FEW = 500  # tokens an expert at which its products take twice as long
UNEVEN, MOVED = 0.1, 0.3
EXCHANGE, NETWORK = 100e9, 40e9  # bytes/s of a GPU within a node, and beyond it
TP, CP, WIDTH = 0.38, 0.19, 2048  # shares of the computing a doubling, at this hidden width
PP = 0.1  # share for each doubling of stages
READ = 3e12  # bytes/s
# Seconds in which the CPU launches a layer forward and backward (Qwen3.5-VL 2B, rows of 2 and 4 samples).
LAUNCH = 4.5e-3
BEYOND = 0.3  # share for each doubling of tp * cp that leaves a node


class Speed:
    """Seconds of a model's rows under layouts that differ."""

    def __init__(self, model: Model, row: Row) -> None:
        self.model, self.row = model, row
        self.forward = forward_flops(model, row)
        self.sparse = [kind.sparse for kind in model.kinds]
        self.experts = 0.0  # share of the decoder's FLOPs a token that experts are
        if any(self.sparse):
            width = model.text.num_experts_per_tok * model.text.moe_intermediate_size
            flops = 6.0 * model.text.hidden_size * width * sum(self.sparse)
            self.experts = min(1.0, flops / model.cost.decoder.per_token)

    def seconds(self, recipe: Recipe, ranks: int) -> float:
        """Seconds of training on a row, by all ranks together."""
        parallel = recipe.parallel
        replicas = data_parallel(recipe, ranks)
        node = min(recipe.machine.gpus or ranks, ranks)
        gpu = find_gpu(recipe.machine.gpu or "")
        peak = gpu.tflops * 1e12 if gpu and gpu.tflops else PEAK
        rows = rows_of_step(recipe, self.row)
        micro_batches = max(1.0, rows / replicas)
        narrow = WIDTH / self.model.text.hidden_size
        cuts = 1 + narrow * (TP * log2(parallel.tp) + CP * log2(parallel.cp))
        cuts += PP * log2(parallel.pp) + BEYOND * max(0.0, log2(parallel.tp * parallel.cp / node))
        rate = parallel.tp * parallel.cp * parallel.pp * BUSY * peak / cuts
        outside = self._tower_flops(recipe) if pipelined_towers(recipe) else 0.0  # of the pipeline's schedule
        busy = (self._flops(recipe) - outside) / rate
        busy += self._exchange(recipe, node) + self._read(recipe)
        busy += self._shared(recipe, ranks, node, BUSY * peak)
        busy *= self._widest(recipe)
        busy *= 1 + (parallel.pp - 1) / (micro_batches * parallel.vpp)
        busy += outside / rate
        return (busy + self._gradients(recipe, ranks, node) / micro_batches) / replicas

    def launches_longer(self, recipe: Recipe, ranks: int) -> bool:
        """Whether the host takes longer to launch a row's layers than a GPU to compute them; experts are not counted."""
        towers = self.model.cost.towers.items()
        layers = sum(not sparse for sparse in self.sparse)
        layers += sum(tower.layers for name, tower in towers if self.forward[name])
        return self.seconds(recipe, ranks) * data_parallel(recipe, ranks) < LAUNCH * layers

    def _flops(self, recipe: Recipe) -> float:
        """FLOPs of training on a row, the experts' as many as would take their time."""
        total = sum(flops * factor(self.model, recipe, part, self.row) for part, flops in self.forward.items())
        if self.experts:
            parallel, text = recipe.parallel, self.model.text
            # Ranks of an expert's group send it the tokens of all of them.
            local_tokens = self.row.total / (parallel.cp * parallel.tp) * parallel.ep * parallel.etp
            tokens = local_tokens * text.num_experts_per_tok / text.num_experts
            slower = FEW / max(tokens, 1.0)
            total += self.forward["decoder"] * self.experts * factor(self.model, recipe, "decoder", self.row) * slower
        return total

    def _tower_flops(self, recipe: Recipe) -> float:
        """FLOPs of training of a row's towers."""
        return sum(self.forward[name] * factor(self.model, recipe, name, self.row) for name in self.model.cost.towers)

    def _ends(self, recipe: Recipe) -> tuple[float, float, float]:
        """FLOPs of training of a decoder layer, and of what stands before the first one and behind the last."""
        flops = {part: forward * factor(self.model, recipe, part, self.row) for part, forward in self.forward.items()}
        layers = max(1, self._layers(recipe) + self.model.mtp)
        layer, head = flops.pop("decoder") / layers, flops.pop("head") + flops.pop(TALKER, 0.0)
        return layer, 0.0 if pipelined_towers(recipe) else sum(flops.values()), head + self.model.mtp * layer

    def _layers(self, recipe: Recipe) -> int:
        """Decoder layers that run: of a thinker that is not trained those before what its talker reads."""
        talker = self.model.talker
        return len(self.model.kinds) if talker is None or trains_thinker(recipe) else talker.accepted

    def _widest(self, recipe: Recipe) -> float:
        """Time of the slowest pipeline stage over that of an even share."""
        if recipe.parallel.pp == 1:
            return 1.0
        layer, first, last = self._ends(recipe)
        stages, left = [0.0] * recipe.parallel.pp, self._layers(recipe)
        for chunk, layers in enumerate(stage_layers(recipe, len(self.model.kinds))):
            stages[chunk % recipe.parallel.pp] += min(layers, left) * layer
            left -= min(layers, left)
        stages[0] += first
        stages[-1] += last
        return max(stages) * recipe.parallel.pp / max(sum(stages), 1.0)

    def balanced(self, recipe: Recipe, layers: int) -> list[int]:
        """Layers of each pipeline stage such that stages take about as long, towers and head counted as layers."""
        layer, first, last = self._ends(recipe)
        stages = recipe.parallel.pp * recipe.parallel.vpp
        if unread := max(0, layers - max(stages, self._layers(recipe))):  # which the last stage holds
            *others, end = self.balanced(recipe, layers - unread)
            return [*others, end + unread]
        layer = max(layer, 1.0)  # none may run
        share = (layers * layer + first + last) / stages
        most = layers - (stages - 2) if stages > 2 else layers - 1
        ends = [min(most, max(1, round((share - extra) / layer))) for extra in (first, last)]
        if stages == 2:
            return [ends[0], layers - ends[0]]
        middle = max(stages - 2, layers - sum(ends))
        ends[1] = max(1, layers - middle - ends[0])
        even, left = divmod(layers - sum(ends), stages - 2)
        return [ends[0], *(even + (stage < left) for stage in range(stages - 2)), ends[1]]

    def _exchange(self, recipe: Recipe, node: int) -> float:
        """Seconds in which tokens go to experts and back, on one rank and row."""
        parallel, text = recipe.parallel, self.model.text
        group = parallel.ep * parallel.etp
        if group == 1 or not self.experts:
            return 0.0
        tokens = self.row.total / (parallel.cp * parallel.tp)
        size = 2 if recipe.engine.precision == "bf16" else 4
        sent = tokens * rows_sent(text, parallel) * text.hidden_size * size * (group - 1) / group
        times = 6 if recipe.engine.recompute == "full" else 4
        if "experts" in self.model.trained_parts:
            # The gradients of their weights run beside one exchange, the products that selective recompute repeats beside another.
            times -= 2 if recipe.engine.recompute == "selective" else 1
        return times * sum(self.sparse) / parallel.pp * sent / (EXCHANGE if group <= node else NETWORK)

    def _shared(self, recipe: Recipe, ranks: int, node: int, rate: float) -> float:
        """Seconds that ranks which share their towers' work take longer than others, whose waits `EXCHANGE` has; less than 0 where it pays.

        Each stage of a pipeline but the first sends all embeddings that it makes, and weights of towers and their gradients once a step.
        """
        parallel, text = recipe.parallel, self.model.text
        waits = parallel.ep * parallel.etp > 1 and bool(self.experts)
        if parallel.towers == "own" or not (waits or parallel.pp > 1):
            return 0.0
        size = 2 if recipe.engine.precision == "bf16" else 4
        made = self.row.media_tokens(self.model.cost.towers) * text.hidden_size * (1 + self.model.deepstack) * size
        sent = 2 * made * max(MOVED if waits else 0.0, 1 - 1 / parallel.pp)
        if parallel.pp > 1:
            trained = sum(weights.count for weights in tower_weights(self.model) if weights.trained)
            sent += trained * (size + FP32) * data_parallel(recipe, ranks) / rows_of_step(recipe, self.row)
        bandwidth = (
            EXCHANGE if max(parallel.ep * parallel.etp, parallel.tp * parallel.cp * parallel.pp) <= node else NETWORK
        )
        uneven = UNEVEN * self._tower_flops(recipe) / (parallel.tp * parallel.cp * parallel.pp * rate) if waits else 0.0
        return sent / bandwidth - uneven

    def _read(self, recipe: Recipe) -> float:
        """Seconds in which a rank's weights are read for a row."""
        rank_share = share(self.model.parameters, recipe, 0)
        size, passes = (2 if recipe.engine.precision == "bf16" else 4, 2 if recipe.engine.recompute == "none" else 3)
        return passes * size * (rank_share.dense + rank_share.experts) / READ

    def _gradients(self, recipe: Recipe, ranks: int, node: int) -> float:
        """Seconds a step for gradients and weights that leave the node, half of which computing hides.

        Each of a node's GPUs carries a share of what the node holds, whether they hold the same weights or parts of them.
        """
        if ranks <= node:
            return 0.0
        held = self.model.parameters.trained / recipe.parallel.pp
        return 0.5 * 6 * held / (node * NETWORK)


def forward_flops(model: Model, row: Row) -> dict[str, float]:
    """FLOPs of a row's forward pass, by part."""
    return model.cost.parts(row.lengths, row.labels, row.media)


def factor(model: Model, recipe: Recipe, part: str, row: Row) -> float:
    """FLOPs of training a part over those of its forward pass; a step of embeddings has one more (`zoo.steps.objectives.retrieval`)."""
    return _one_pass(model, recipe, part, row) + float(recipe.train.embeds)


def _one_pass(model: Model, recipe: Recipe, part: str, row: Row) -> float:
    trained, full = model.trained_parts, recipe.engine.recompute == "full"
    if part in model.cost.towers:
        adapted = bool(recipe.lora.rank) and part in recipe.lora.parts
        return train_factor(frozen=part not in trained, first=not adapted, recomputed=float(full))
    again = {"none": 0.0, "selective": _recomputed(model), "full": 1.0}[recipe.engine.recompute]
    if part == TALKER:  # by the thinker's share: both are mostly experts
        return train_factor(frozen=TALKER not in trained, recomputed=again)
    if model.talker is not None and not trains_thinker(recipe):
        return train_factor(frozen=True, first=True)
    names = {"decoder": ("decoder", "experts", "multi_token"), "head": ("head", "embedding")}[part]
    behind = {"decoder", "experts", "multi_token", "head", TALKER}
    before = trained - behind  # parts that the decoder's gradient goes to
    if mlp_in_chunks(recipe, row):
        again += _recomputed(model, experts=False)
    frozen, decoder = not trained & set(names), part == "decoder"
    again = again if decoder else float(labels_in_chunks(recipe, row))
    return train_factor(frozen=frozen, first=decoder and not before, recomputed=again)


def _recomputed(model: Model, experts: bool = True) -> float:
    """Share of the decoder's FLOPs that MLP and experts are, by their active weights."""
    text, share = model.text, 0.0
    for kind in model.kinds:
        if kind.sparse and not experts:
            continue
        width = text.num_experts_per_tok * text.moe_intermediate_size if kind.sparse else text.intermediate_size
        share += 6.0 * text.hidden_size * width
    return min(1.0, share / model.cost.decoder.per_token)
