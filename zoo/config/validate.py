"""Checks of a whole recipe against the number of ranks, and the defaults that follow from other keys.

Runs before anything is loaded or started. Every refusal is one sentence that names the keys, the values and
what would work. :func:`validate` may be called again on its own result.
"""

from __future__ import annotations

import importlib.util
import re

from zoo.config.architecture import check_arch
from zoo.config.checks.engine import check_engine, check_gpus, check_packages
from zoo.config.checks.layout import check_layout, check_packing
from zoo.config.checks.model import check_lora, check_model
from zoo.config.checks.rl import check_rl, derived_rl
from zoo.config.checks.training import check_optimizer, check_preference, check_schedule, check_speech, parse_metric
from zoo.config.derived import alignment, run_folder, sequence_parallel, text_alone
from zoo.config.devices import gpu_count
from zoo.config.entries import check_entries
from zoo.config.gpus import find_gpu, near_gpus
from zoo.config.hub import check_repo_name
from zoo.config.layers.keys import keys, nearest, nearest_keys, sections
from zoo.config.schema import Recipe
from zoo.errors import ConfigError
from zoo.files import expanded, size_in_bytes
from zoo.types import JsonObject

_TRACKERS = (
    ("wandb", "Weights & Biases"), ("mlflow", "MLflow"), ("trackio", "Trackio"), ("swanlab", "SwanLab"), ("comet", "Comet"),
)  # fmt: skip
# What parallel.plan may name.
PLANNED = ("tp", "pp", "cp", "ep", "recompute", "memory", "offload", "graphs", "towers", "batch")


def validate(recipe: Recipe, world_size: int, *, on_this_machine: bool = True) -> Recipe:
    """`recipe` with its derived defaults filled in: run.dir, parallel.sp, packing.align, engine.precision.

    `on_this_machine`: it is to train on this machine, which has to have the GPUs and packages that its keys need, not only planned for `machine.gpu`.

    Raises:
        ConfigError: the recipe cannot run on `world_size` ranks; the message says why and what would.
        UnknownFamilyError: no package registers `model.family`.
    """
    recipe = recipe.replace()  # types and choices, for a recipe that was copied by hand
    check_arch(recipe.model.arch, "model.arch")
    _check_values(recipe)
    check_model(recipe)
    check_lora(recipe)
    check_optimizer(recipe)
    check_preference(recipe)
    check_speech(recipe)
    recipe = recipe.replace(derived_rl(recipe))
    check_rl(recipe)
    steps, epochs = recipe.train.steps, recipe.train.epochs
    if steps is None and epochs is None:
        raise ConfigError("train.steps and train.epochs are both null: give one of them, such as train.epochs=1")
    if steps is not None and epochs is not None:
        raise ConfigError(f"train.steps={steps} and train.epochs={epochs:g} are both given: set one of them to null")
    check_schedule(recipe.train, steps)
    recipe = recipe.replace(_derived(recipe))
    check_layout(recipe, world_size)
    check_packing(recipe)
    if on_this_machine:
        check_packages(recipe)
        for key, name in _TRACKERS:
            module = "comet_ml" if key == "comet" else key
            if (value := getattr(recipe.log, key)) and importlib.util.find_spec(module) is None:
                hint = f"pip install 'zoo-train[{key}]', or leave log.{key} out"
                raise ConfigError(f"log.{key}={value}: {name} is not installed; {hint}")
    check_gpus(recipe, on_this_machine=on_this_machine)
    check_engine(recipe)
    _check_run(recipe)
    _check_profile(recipe, world_size)
    train = recipe.train
    for key in ("keep_best", "early_stop"):
        if (metric := getattr(train, key)) is not None:
            parse_metric(metric, f"train.{key}")
    if train.early_stop is not None and not train.eval_every:
        raise ConfigError(
            f"train.early_stop={train.early_stop}: train.eval_every=0 evaluates at the end alone; give the steps between "
            "evaluations, train.eval_every=100 say"
        )
    return recipe


def _check_run(recipe: Recipe) -> None:
    """Keys that a resumed run may change, and the folder that checkpoints are written to first."""
    for name in recipe.run.accept_changes:
        if name not in keys(Recipe) and name not in sections(Recipe) and not name.startswith("model.arch."):
            near = ", ".join(nearest_keys(Recipe, name))
            hint = f"nearest: {near}" if near else "`zoo show --schema` lists the keys"
            raise ConfigError(f"run.accept_changes={name}: no such key or section; {hint}")
    if recipe.run.stage is None:
        return
    stage, run_dir = expanded(recipe.run.stage).resolve(), expanded(recipe.run.dir or "").resolve()
    if stage == run_dir or stage in run_dir.parents or run_dir in stage.parents:
        raise ConfigError(
            f"run.stage={recipe.run.stage}: it is in run.dir={recipe.run.dir}, or the other way round; give a folder of its own "
            "on a local disk"
        )


def _check_profile(recipe: Recipe, world_size: int) -> None:
    if (steps := recipe.run.profile) is None:
        return
    parts = re.fullmatch(r"(\d{1,9}):(\d{1,9})", steps, re.ASCII)
    if parts is None or not 1 <= int(parts[1]) <= int(parts[2]):
        raise ConfigError(
            f"run.profile={steps}: wanted the first and the last step, from 1 up, as in run.profile=20:22"
        )
    for rank in recipe.run.profile_ranks:
        if rank >= world_size:
            raise ConfigError(f"run.profile_ranks={rank}: the run has {world_size} ranks, from 0 up; give one of them")


def _derived(recipe: Recipe) -> JsonObject:
    """Values of the keys left open that follow from other keys or from the machine."""
    sp = sequence_parallel(recipe)
    changes: JsonObject = {"run.dir": str(expanded(run_folder(recipe))), "parallel.sp": sp}
    if recipe.train.preference or recipe.train.embeds or recipe.distill.teacher is not None:
        changes["train.mtp_loss"] = 0.0  # multi-token prediction learns single answers
    if recipe.train.preference and not recipe.lora.keep_dropout:
        changes["lora.dropout"] = 0.0  # its noise would stand in differences of log-probabilities
    if recipe.train.embeds:
        changes["lora.dropout"] = 0.0  # both passes of a step give the same vectors
        if recipe.embed.template == "auto":
            changes["embed.template"] = "plain" if text_alone(recipe) else "chat"
    if recipe.train.headless:
        changes["log.predictions"] = 0  # a model without a head gives no answers
    if recipe.run.stage is not None:
        changes["run.stage"] = str(expanded(recipe.run.stage))
    if recipe.packing.align is None:
        changes["packing.align"] = alignment(recipe)
    if recipe.engine.precision is None:
        changes["engine.precision"] = "bf16" if gpu_count() else "fp32"
    return changes


def _check_values(recipe: Recipe) -> None:
    for name in recipe.parallel.plan:
        if name not in PLANNED:
            near = ", ".join(nearest(name, list(PLANNED)))
            raise ConfigError(f"parallel.plan={name}: nothing of that name is planned; nearest: {near}")
    if recipe.machine.gpu is not None and find_gpu(recipe.machine.gpu) is None:
        near = ", ".join(near_gpus(recipe.machine.gpu))
        raise ConfigError(f"machine.gpu={recipe.machine.gpu}: no such GPU; nearest: {near or '`zoo list` shows them'}")
    if recipe.train.min_lr > recipe.train.lr:
        raise ConfigError(
            f"train.min_lr={recipe.train.min_lr:g} is above train.lr={recipe.train.lr:g}: the rate falls from train.lr to "
            f"train.min_lr; give a lower train.min_lr, 0 say"
        )
    size_in_bytes(recipe.max_shard_size, "max_shard_size")
    if recipe.hub.repo is not None:
        check_repo_name(recipe.hub.repo, "hub.repo")
    if not recipe.data.train:
        raise ConfigError("data.train=[]: nothing to train on; name a JSONL file or a bundled set")
    least, most = recipe.data.min_pixels, recipe.data.max_pixels
    if least is not None and most is not None and least > most:
        raise ConfigError(
            f"data.min_pixels={least} is above data.max_pixels={most}: no image fits both; give a lower data.min_pixels"
        )
    known = ["augment", "augment_variants", "blank_answers"]
    for name, value in recipe.data.bundled.items():  # defaults for the bundled set
        if name not in known:
            near = ", ".join(nearest(name, known))
            raise ConfigError(f"data.bundled.{name}: no such key; nearest: {near}")
        key = keys(Recipe)[f"data.{name}"]
        whole = name != "augment_variants" or float(value).is_integer()
        if key.bounds is not None and not (key.bounds.hold(value) and whole):
            raise ConfigError(f"data.bundled.{name}={value:g}: wanted {key.wanted}")
    check_entries(recipe.data.train, recipe.data.eval)
