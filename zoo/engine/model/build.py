"""From a recipe to model chunks, optimizer and learning-rate schedule."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.bridge import Dims, ShardInfo, load_hf
from zoo.bridge.native import check_sums, native
from zoo.bridge.parallel import cut, default_comm, full_shape, model_parameters
from zoo.config.compose import replace_in
from zoo.config.locate import Place, locate, look, read_arch
from zoo.config.schema import Recipe, TrainConfig
from zoo.engine.checkpoint import sharded
from zoo.engine.checkpoint.selection import check_beside_weights
from zoo.engine.distributed.gradient_reduction import reduce_in_order
from zoo.engine.distributed.object_group import agreed
from zoo.engine.distributed.world import World, on_all_cores, seed_everything
from zoo.engine.model import lora
from zoo.engine.train.adamw import fuse
from zoo.errors import UserError
from zoo.nn.decoder.weight_gradients import accumulate_in_place
from zoo.nn.kernels import has_triton
from zoo.nn.multimodal import Stage
from zoo.registry import ModelFamily, get_family

BUCKET = 40_000_000  # gradients that are reduced at once while the backward pass goes on


@dataclass(frozen=True)
class Assembly:
    """What a recipe's model consists of, before any weight: family, its config, processor, and the source."""

    family: ModelFamily
    config: Any
    processor: Any
    source: Place | None  # where the weights come from; None for random ones

    def save_files(self, folder: Path) -> None:
        """Write config.json and the processor's files."""
        self.processor.save(folder)
        (folder / "config.json").write_text(self.config.hf.to_json_string(), encoding="utf-8")


def assemble(recipe: Recipe) -> Assembly:
    """Resolve family, architecture and processor; raises UserError where something is missing."""
    family = get_family(recipe.model.family)
    config_class, build_processor = family.load("config"), family.load("processor")
    if recipe.model.init != "random":
        init = recipe.model.init
        # A run that still trains gets further checkpoints: the first rank says which is the newest.
        source = agreed(lambda: look(init)) or locate(init, key="model.init")
        check_beside_weights(source)
        config = config_class.from_folder(source.files)
        return Assembly(family, config, build_processor(config.hf, str(source.files)), source)
    if not recipe.model.arch:
        raise UserError("model.init=random needs an architecture: give size=... or model.init=<folder>")
    config = config_class.from_arch(recipe.model.arch)
    processor = build_processor(config.hf, None)
    return Assembly(family, config.for_processor(processor), processor, None)


def build_model(assembly: Assembly, recipe: Recipe, world: World) -> list[Any]:
    """This rank's model chunks (several with an interleaved pipeline), with random weights."""
    from megatron.core.transformer.module import Float16Module

    chunks = []
    for index in range(recipe.parallel.vpp):
        seed_everything(recipe.run.seed)  # towers are made alike on every rank
        stage = Stage(
            first=world.pp_rank == 0 and index == 0,
            last=world.pp_rank == world.pp_size - 1 and index == recipe.parallel.vpp - 1,
            vp_stage=index if recipe.parallel.vpp > 1 else None,
        )
        chunks.append(assembly.family.load("model")(assembly.config, recipe, stage).to(world.device))
    if recipe.engine.precision == "bf16":
        return [Float16Module(chunk.config, chunk) for chunk in chunks]
    return chunks


def build_step(assembly: Assembly, recipe: Recipe, world: World) -> Any:
    """The family's PackedStep for this rank."""
    groups = world.groups
    return assembly.family.load("step")(
        assembly.config,
        recipe.packing,
        world.device,
        cp_group=groups.cp if groups.cp.size() > 1 else None,
        media_group=groups.tp_cp if groups.tp_cp.size() > 1 else None,
        mtp_depths=assembly.config.mtp_layers(recipe),
        mtp_weight=recipe.train.mtp_loss,
        encodes_media=world.pp_rank == 0,
    )


def init_weights(chunks: list[Any], assembly: Assembly, recipe: Recipe, world: World) -> None:
    """Weights from the source folder, or random ones that don't depend on the parallel layout."""
    bridge, dims = assembly.family.load("bridge"), model_dims(assembly)
    shard, source = ShardInfo.from_groups(world.groups), assembly.source
    if source is not None and source.kind == "run":
        load_run(chunks, source, assembly, recipe, world)
        return
    if source is not None:
        if source.kind == "zoo":
            check_sums(source.folder, default_comm())
        table = native(bridge) if source.kind == "zoo" else bridge
        with on_all_cores(recipe, world):
            load_hf(chunks, source.weights, table, dims, shard)
        return
    randomise(chunks, bridge, dims, shard, recipe.run.seed, assembly.config.text.initializer_range)


def weight_bytes(assembly: Assembly) -> int:
    """Bytes of the safetensors files that weights come from; 0 where they come from elsewhere, or nowhere."""
    if assembly.source is None or assembly.source.kind == "run":
        return 0
    return sum(file.stat().st_size for file in assembly.source.weights.glob("*.safetensors"))


def load_run(
    chunks: list[Any], run: Place, assembly: Assembly, recipe: Recipe, world: World
) -> lora.Adapters | None:
    """Weights of a run's checkpoint; where it holds adapters, what they belong to with these merged, and they are told."""
    settings = sharded.read_origin(run).get("lora")
    if settings is None:
        sharded.load_weights(chunks, run.folder, world)
        return None
    base = replace(assembly, source=sharded.started_from(run))
    init_weights(chunks, base, recipe, world)
    adapters = attach_adapters(chunks, base, replace_in(recipe, {"lora": settings}), world)
    sharded.load_adapters(adapters, run.folder)
    adapters.merge()
    return adapters


def attach_adapters(chunks: list[Any], assembly: Assembly, recipe: Recipe, world: World) -> lora.Adapters:
    """New adapters beside the weights of `assembly.source`, a Hugging Face folder."""
    assert assembly.source is not None
    arch = read_arch(assembly.source.files)
    return lora.attach(chunks, assembly.family, model_dims(assembly), arch, recipe, world)


def model_dims(assembly: Assembly) -> Dims:
    """Numbers of the decoder that the bridge needs."""
    return Dims.from_hf(assembly.config.text, tied=assembly.config.tied)


@torch.no_grad()
def randomise(chunks: list[Any], bridge: Any, dims: Dims, shard: ShardInfo, seed: int, std: float) -> None:
    """Normal(0, std) for every matrix of the decoder, cut from the full tensor that its name and `seed` give.

    So a run from random weights starts from the same model under any parallel layout of GPUs of one model, or of CPUs:
    the numbers are drawn where the parameter lies (a core makes some 50 million a second). A parameter may bring its
    own `initial(shape, generator)`; other vectors (norms) and towers keep what they were made with.
    """
    parameters = dict(model_parameters(chunks))
    for name, entry in bridge.publish(parameters).items():
        parameter = parameters[name]
        initial = getattr(parameter, "initial", None)
        if "{rest}" in entry.rule.zoo or (parameter.ndim < 2 and initial is None):
            continue
        how = entry.rule.shard_for(dims)
        shape = full_shape(parameter.shape, how, shard)
        if initial is not None:
            parameter.copy_(cut(initial(shape, _generator(f"{seed}/{name}")), how, shard))
            continue
        if not entry.rule.stacked:
            parameter.copy_(cut(_normal(shape, std, f"{seed}/{name}", parameter.device), how, shard))
            continue
        first = shard.ep_rank * parameter.shape[0]
        for local in range(parameter.shape[0]):
            full = _normal(shape[1:], std, f"{seed}/{name}/{first + local}", parameter.device)
            parameter[local].copy_(cut(full, how, shard))


def _normal(shape: Any, std: float, name: str, device: torch.device) -> Tensor:
    return torch.randn(*shape, generator=_generator(name, device), device=device).mul_(std)


def _generator(name: str, device: torch.device | str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(zlib.crc32(name.encode()))


def freeze(chunks: list[Any], parts: list[str], family: ModelFamily) -> None:
    """Stop training the named parts: no gradient, no optimizer state."""
    for name, parameter in model_parameters(chunks):
        if family.part_of(name) in parts:
            parameter.requires_grad_(False)


def wrap_ddp(chunks: list[Any], recipe: Recipe) -> list[Any]:
    """mcore's DDP with gradients reduced in fp32 and sharded for the distributed optimizer."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    on_gpu = torch.cuda.is_available()
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=on_gpu,
        overlap_param_gather=False,
        bucket_size=BUCKET if on_gpu else None,
    )
    wrapped: list[Any] = [
        DistributedDataParallel(chunk.config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    config = chunks[0].config
    config.finalize_model_grads_func = finalize_model_grads
    if on_gpu:
        if recipe.engine.precision == "bf16":
            accumulate_in_place(chunks)
        for chunk in wrapped:
            reduce_in_order(chunk)
        config.no_sync_func = [chunk.no_sync for chunk in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
    for chunk in chunks[1:]:
        chunk.config.finalize_model_grads_func = finalize_model_grads
    return wrapped


def build_optimizer(
    chunks: list[Any], recipe: Recipe, family: ModelFamily, total_steps: int
) -> tuple[Any, Any]:
    """AdamW as mcore's distributed optimizer, and its warm-up and cosine schedule."""
    from megatron.core.optimizer import (
        OptimizerConfig,
        ParamKey,
        get_megatron_optimizer,
        get_standard_config_overrides,
    )
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
    groups: dict[Any, Any] = get_standard_config_overrides(config)
    for part, scale in train.lr_scale.items():
        of_part = ParamWithNamePredicate(part, lambda _, name, part=part: family.part_of(name) == part)
        groups[ParamKey(with_name_predicate=of_part)] = {
            "max_lr": train.lr * scale,
            "min_lr": train.min_lr * scale,
        }
    optimizer = get_megatron_optimizer(config, chunks, config_overrides=groups, use_gloo_process_groups=False)
    if torch.cuda.is_available() and has_triton():
        fuse(optimizer)
    config.grad_scale_func = optimizer.scale_loss
    return optimizer, build_schedule(optimizer, train, total_steps)


def build_schedule(optimizer: Any, train: TrainConfig, total_steps: int) -> Any:
    """The learning rate of update k of N = `total_steps`, k from 1, in each of the optimizer's groups.

    In a warm-up of W steps it is lr * k / W. Then it follows a cosine that would reach min_lr one update after the last:
    min_lr + (lr - min_lr) * (1 + cos(pi * (k - W) / (N + 1 - W))) / 2. So every update moves the weights.
    """
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    after_last = max(total_steps, train.warmup_steps) + 1
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=train.lr,
        min_lr=train.min_lr,
        lr_warmup_steps=train.warmup_steps,
        lr_decay_steps=after_last,
        lr_decay_style="cosine",
        start_wd=train.weight_decay,
        end_wd=train.weight_decay,
        wd_incr_steps=after_last,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # a resumed run, too, follows its recipe
    )
