"""The parts that update the weights: DDP, AdamW or Muon in megatron-core's distributed optimizer, and the learning-rate schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from zoo.config.schema import Recipe, TrainConfig
from zoo.model.build import Assembly, model_dims
from zoo.model.graphs import use_graphs
from zoo.nn.graphs.layers import release_graphs
from zoo.nn.weight_gradients import accumulate_in_place
from zoo.optim import muon
from zoo.optim.adamw import AdamW, norm_gradients
from zoo.optim.copies import share_copies
from zoo.optim.part_norms import squared
from zoo.parallel.gradient_reduction import accumulate_directly, divide_at_the_loss, reduce_in_order, sum_by_dtype
from zoo.parallel.megatron import inner_optimizer
from zoo.parallel.weight_gathering import gather_once, settle_all
from zoo.parallel.world import World, cores_beside_gpu

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import MegatronOptimizer, ParamKey
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.transformer.module import MegatronModule

MOMENTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.uint8}
BUCKET = 40_000_000  # gradients that are reduced at once while the backward pass continues


def wrap_ddp(chunks: list[MegatronModule], recipe: Recipe) -> list[DistributedDataParallel]:
    """Model chunks in megatron-core's DDP, with gradients reduced in fp32 and sharded for the distributed optimizer.

    Gradients that are kept in bf16 are exchanged as such; their sum is made in fp32 and rounded once. Where no rank has the
    same weights, nothing is exchanged during the backward pass: the bookkeeping of each gradient would use the CPU's time.
    Gradients are the ranks' mean, whether megatron-core's schedules or a loop of its own made the backward pass.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    on_gpu, half = torch.cuda.is_available(), recipe.train.main_grads_dtype == "bf16"
    ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    replicas = max(ranks, parallel_state.get_expert_data_parallel_world_size())
    graphs = on_gpu and recipe.engine.cuda_graphs
    overlap = on_gpu and replicas > 1 and not graphs
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=not half,
        reduce_scatter_with_fp32_accumulation=half,
        use_distributed_optimizer=True,
        overlap_grad_reduce=overlap,
        overlap_param_gather=False,
        bucket_size=BUCKET if overlap else None,
    )
    wrapped = [
        # Reductions that sum bf16 in fp32 take one bucket each: a chunk's must not be put together.
        DistributedDataParallel(chunk.config, ddp_config, chunk, disable_bucketing=index > 0 and not half)
        for index, chunk in enumerate(chunks)
    ]
    if on_gpu and recipe.engine.precision == "bf16":
        accumulate_in_place(chunks)
    for chunk in wrapped:
        chunk.config.finalize_model_grads_func = finalize_model_grads
        if half:
            sum_by_dtype(chunk)
        if overlap:
            reduce_in_order(chunk)
        if ranks > 1:
            divide_at_the_loss(chunk, ranks, always=parallel_state.get_pipeline_model_parallel_world_size() > 1)
        if not overlap:
            accumulate_directly(chunk)
    if on_gpu:
        several = len(wrapped) > 1
        chunks[0].config.no_sync_func = [chunk.no_sync for chunk in wrapped] if several else wrapped[0].no_sync
    if graphs:
        use_graphs(chunks)
    return wrapped


def release_ddp(wrapped: Sequence[DistributedDataParallel]) -> None:
    """Free the memory of model chunks that :func:`wrap_ddp` has wrapped; they can't be used any more.

    megatron-core has autograd's nodes hold DDP, and the optimizer hold the nodes, where Python's garbage collector can't see it.
    So DDP's functions are taken off the nodes, and parameters lose their storage. Other views of a storage are unchanged.
    """
    release_graphs(wrapped)
    settle_all()
    for chunk in wrapped:
        for node in chunk.grad_accs:
            node.register_hook(print).hooks_dict_ref().clear()  # a new one's handle leads to all
        chunk.grad_accs.clear()
        for parameter in chunk.parameters():
            parameter.data, parameter.grad, parameter.main_grad = parameter.new_empty(0), None, None


def build_optimizer(
    chunks: list[DistributedDataParallel], recipe: Recipe, assembly: Assembly, world: World, total_steps: int
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """zoo's AdamW, and Muon if the recipe says so, in megatron-core's distributed optimizer; and the learning rate's schedule."""
    from megatron.core.optimizer import OptimizerConfig, ParamKey, get_megatron_optimizer, get_standard_config_overrides
    from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate

    train = recipe.train
    config = OptimizerConfig(
        optimizer="adam",
        lr=train.lr,
        min_lr=train.min_lr,
        weight_decay=train.weight_decay,
        adam_beta1=train.beta1,
        adam_beta2=train.beta2,
        adam_eps=train.eps,
        clip_grad=train.clip_grad,
        bf16=recipe.engine.precision == "bf16",
        params_dtype=torch.bfloat16 if recipe.engine.precision == "bf16" else torch.float32,
        use_distributed_optimizer=True,
    )
    config.exp_avg_dtype = MOMENTS[train.exp_avg_dtype]
    config.exp_avg_sq_dtype = MOMENTS[train.exp_avg_sq_dtype]
    groups: dict[ParamKey, dict[str, float]] = get_standard_config_overrides(config)
    for scale in sorted(
        {part * b for part in (1.0, *train.lr_scale.values()) for b in (1.0, recipe.lora.b_lr_scale)} - {1.0}
    ):
        scaled = ParamWithNamePredicate(
            f"times {scale:g}", lambda _, name, scale=scale: lr_scale(name, recipe, assembly) == scale
        )
        groups[ParamKey(with_name_predicate=scaled)] = {"max_lr": train.lr * scale, "min_lr": train.min_lr * scale}
    make_inner: Callable[..., AdamW]
    if train.optimizer == "muon":
        make_inner = muon.maker(train.momentum, train.matrix_lr_scale)
    else:
        threads = cores_beside_gpu(recipe, world)
        make_inner = partial(AdamW, offload=train.optimizer_offload_fraction, threads=threads)
    optimizer = inner_optimizer.build(
        config,
        make_inner,
        lambda: get_megatron_optimizer(config, chunks, config_overrides=groups, use_gloo_process_groups=False),
    )
    share_copies(optimizer, world.groups.embd)
    ahead = recipe.parallel.overlap_param_gather and chunks[0].ddp_config.overlap_grad_reduce
    gather_once(optimizer, chunks, ahead=ahead)
    if train.optimizer == "muon":
        muon.share_out(optimizer, chunks, assembly.family, model_dims(assembly), world)
    return optimizer, build_schedule(optimizer, train, total_steps)


def lr_scale(name: str, recipe: Recipe, assembly: Assembly) -> float:
    """Factor of the learning rate for a parameter: its part's, and for B and magnitudes of an adapter that of LoRA+, as in PEFT."""
    of_part = recipe.train.lr_scale.get(assembly.family.part_of(name, recipe.named_parts), 1.0)
    return of_part * (recipe.lora.b_lr_scale if ".lora." in name and name.endswith((".b", ".m")) else 1.0)


def squared_norm(optimizer: MegatronOptimizer, device: torch.device) -> torch.Tensor:
    """() float64 on the device: this rank's share of the gradient's squared norm; the shares of all ranks add up to it.

    megatron-core's `get_grad_norm` sums them, too, and waits for the device once for each parameter.
    """
    return squared(norm_gradients(optimizer), device)


def build_schedule(optimizer: MegatronOptimizer, train: TrainConfig, total_steps: int) -> OptimizerParamScheduler:
    """The learning rate of update k of N = `total_steps`, k from 1, in each of the optimizer's groups.

    In a warm-up of W steps it is lr * k / W. Then `train.schedule` gives the share s of lr - min_lr above min_lr:

    - cosine: (1 + cos(pi * (k - W) / (N + 1 - W))) / 2
    - linear: (N + 1 - k) / (N + 1 - W)
    - constant: 1
    - wsd: 1, and in the last D updates (N + 1 - k) / (D + 1); D is decay_steps, or a tenth of N, as far as the warm-up leaves it

    So all but constant would reach min_lr one update after the last, and every update moves the weights.
    """
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=train.lr,
        min_lr=train.min_lr,
        lr_warmup_steps=train.warmup_steps,
        lr_decay_style="WSD" if train.schedule == "wsd" else train.schedule,
        lr_wsd_decay_style="linear",
        start_wd=train.weight_decay,
        end_wd=train.weight_decay,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # a resumed run, too, follows its recipe
        **_lengths(train, total_steps),
    )


def set_schedule_length(schedule: OptimizerParamScheduler, train: TrainConfig, total_steps: int) -> None:
    """Correct the number of updates of a schedule, from the next one on."""
    for name, steps in _lengths(train, total_steps).items():
        setattr(schedule, name, steps)


def _lengths(train: TrainConfig, total_steps: int) -> dict[str, int]:
    """What megatron-core's schedule has of the number of updates."""
    after_last = max(total_steps, train.warmup_steps) + 1
    decay = train.decay_steps or min(max(total_steps // 10, 1), after_last - 1 - train.warmup_steps)
    return {"lr_decay_steps": after_last, "wsd_decay_steps": decay + 1, "wd_incr_steps": after_last}
