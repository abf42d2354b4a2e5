"""What follows from a recipe: data-parallel replicas, alignment of samples, run folder."""

from __future__ import annotations

import hashlib
from math import lcm
from pathlib import Path

from zoo.config.architecture import num_experts
from zoo.config.schema import Recipe
from zoo.files import expanded
from zoo.registry import get_family

TEACHER = "teacher.json"  # the index of a folder of a teacher's tokens (zoo.training.distillation.token_files)
STAGED = 2  # checkpoints that run.stage holds at most: one that is copied, and one that is written or waits


def random_base(recipe: Recipe) -> str:
    """A sentence where adapters are trained on random weights; "" elsewhere."""
    if not recipe.lora.rank or recipe.model.init != "random":
        return ""
    return (
        f"lora.rank={recipe.lora.rank} with model.init=random: the weights under the adapters are random and stay so; name weights "
        "with model.init=<folder, run or hub id>, or train them with lora.rank=0"
    )


def teacher_on_disk(recipe: Recipe) -> bool:
    """Whether `distill.teacher` is a folder of a teacher's tokens, in the place of a model."""
    folder = recipe.distill.teacher
    return folder is not None and (expanded(folder) / TEACHER).is_file()


def text_alone(recipe: Recipe) -> bool:
    """Whether the family takes no media."""
    return get_family(recipe.model.family).modalities == ("text",)


def trained_parts(recipe: Recipe) -> set[str]:
    """Parts of the family's model that the recipe trains, whole or by adapters: a talker where its loss counts."""
    if recipe.lora.rank:
        return {*recipe.lora.parts, *recipe.lora.whole_parts}
    family = get_family(recipe.model.family)
    absent = set() if recipe.train.speech_loss else {"talker"}
    return {*family.parts, *(set(family.inner) & recipe.named_parts)} - set(recipe.model.freeze) - absent


def trains_thinker(recipe: Recipe) -> bool:
    """Whether anything but the talker is trained."""
    return trained_parts(recipe) != {"talker"}


def data_parallel(recipe: Recipe, world_size: int) -> int:
    """Replicas of the model that see different samples."""
    parallel = recipe.parallel
    return world_size // (parallel.tp * parallel.pp * parallel.cp)


def micro_batches(recipe: Recipe, world_size: int) -> tuple[int, int]:
    """Micro-batches of a step on each rank, and how many of all replicas' only fill the step up and count nothing.

    Interleaved pipelines want a multiple of their stages.
    """
    rows, replicas = recipe.train.global_batch // recipe.train.micro_batch, data_parallel(recipe, world_size)
    multiple = recipe.parallel.pp if recipe.parallel.vpp > 1 else 1
    each = -(-rows // (replicas * multiple)) * multiple
    return each, each * replicas - rows


def stage_layers(recipe: Recipe, layers: int) -> list[int]:
    """Decoder layers of each pipeline stage, or of each of its chunks, in the model's order.

    What an even cut leaves over goes to the stages in between, then to the last one: the first has embedding and towers, the
    last the head.
    """
    parallel = recipe.parallel
    if parallel.stage_layers:
        return list(parallel.stage_layers)
    count = parallel.pp * parallel.vpp
    even, left = divmod(layers, count)
    order = [*range(1, count - 1), count - 1, 0]
    return [even + (order.index(stage) < left) for stage in range(count)]


def run_folder(recipe: Recipe) -> str:
    """`run.dir`, or the folder a run gets by default: runs/<recipe>-<size>."""
    if recipe.run.dir is not None:
        return recipe.run.dir
    size = f"-{Path(recipe.size).stem}" if recipe.size else ""
    return f"runs/{Path(recipe.recipe).stem}{size}"


def alignment(recipe: Recipe) -> int:
    """Tokens a packed sample's length has to be a multiple of.

    Each is cut in 2*cp chunks, and with sequence parallel a rank's part of the row, 1/cp of it, in tp shares. Products
    in FP8 of Transformer Engine want multiples of 16 tokens on a rank.
    """
    parallel = recipe.parallel
    shares = parallel.tp if sequence_parallel(recipe) else 1
    engine = recipe.engine
    shares = lcm(shares, 16) if engine.fp8 and engine.fp8_recipe == "tensorwise" else shares
    return parallel.cp * lcm(2, shares) if parallel.cp > 1 else shares


def sequence_parallel(recipe: Recipe) -> bool:
    """`parallel.sp`, or what it is by default."""
    parallel = recipe.parallel
    return parallel.sp if parallel.sp is not None else parallel.tp > 1 and num_experts(recipe.model.arch) > 0


def stage_folder(recipe: Recipe) -> Path | None:
    """The folder in `run.stage` of the checkpoints of this run: its name, and a hash of where it is; None without a stage."""
    if recipe.run.stage is None:
        return None
    run_dir = expanded(run_folder(recipe)).resolve()
    digest = hashlib.sha256(str(run_dir).encode()).hexdigest()[:8]
    return expanded(recipe.run.stage) / f"{run_dir.name}-{digest}"


def saves_at_once(recipe: Recipe, most: int) -> int:
    """Checkpoints of a run that are there at once: `most` at most, and one where it saves at its end alone."""
    train = recipe.train
    if not (train.save_every or train.save_minutes):
        return 1
    return min(train.steps // train.save_every + 1, most) if train.steps and train.save_every else most
