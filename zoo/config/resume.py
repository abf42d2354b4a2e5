"""What a recipe may say differently when a run is resumed: length, place, hardware, logging, and how gradients and AdamW's state are held.

Every key of the schema stands in one of the three lists below. A key that is not free has to be as the checkpoint's recipe
had it, unless `run.accept_changes` names it or its section.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zoo.config.entries import parse_entry
from zoo.config.files import read_recipe
from zoo.config.layers.keys import keys, shown_value
from zoo.config.schema import Recipe
from zoo.errors import ConfigError, UserError, printable
from zoo.files import expanded
from zoo.records import reading_back
from zoo.types import JsonMapping, JsonObject

# Keys that may change freely, by topic.
MAY_CHANGE: dict[str, tuple[str, ...]] = {
    "names, whose contents are compared themselves": ("recipe", "size", "hardware"),
    "length": (
        "train.steps", "train.epochs", "train.max_minutes", "train.early_stop", "train.early_stop_patience", "train.early_stop_min_delta",
    ),
    "saving, evaluation and export": (
        "train.eval_every", "train.eval_rows", "train.save", "train.save_every", "train.save_minutes", "train.keep", "train.keep_best", "export",
        "max_shard_size", "hub.repo", "hub.private",
    ),
    "logging": (
        "train.log_every", "log.tensorboard", "log.wandb", "log.mlflow", "log.trackio", "log.swanlab", "log.comet", "log.slow_step",
        "log.straggler_steps", "log.part_norms_every", "log.predictions", "log.prediction_tokens", "run.profile", "run.profile_ranks",
    ),
    "paths": ("run.dir", "run.stage", "data.root", "data.outside_root", "data.urls"),
    "how the run is watched": ("run.resume", "run.callbacks", "run.accept_changes", "run.hang_timeout", "run.save_within"),
    "what becomes of bad rows and bad steps": (
        "data.on_error", "train.on_bad_step", "train.bad_steps", "train.skip_limit", "train.on_new_level", "train.spike",
        "train.spike_after",
    ),
    "hardware": (
        "nproc", "nproc_cpu", "machine.gpu", "machine.gpus", "machine.memory_gb", "machine.nodes", "machine.host_memory_gb", "data.cache_mb", "data.workers",
        "data.row_seconds", "data.row_mb", "data.encode_in_workers", "data.ahead_mb", "rl.batch", "rl.reward_seconds", "rl.reward_processes",
        "rl.vllm.memory", "rl.vllm.tensor_parallel", "rl.vllm.sleep",
    ),
    "layout": (
        "parallel.tp", "parallel.pp", "parallel.vpp", "parallel.stage_layers", "parallel.cp", "parallel.cp_split", "parallel.ep", "parallel.etp", "parallel.sp",
        "parallel.plan", "parallel.planned", "packing.pad_to", "packing.align", "train.micro_batch",
    ),
    "how the same numbers are computed": (
        "run.deterministic", "parallel.dispatch", "parallel.overlap_param_gather", "parallel.towers", "engine.backend", "engine.recompute", "engine.offload_activations", "engine.cuda_graphs", "engine.threads", "engine.delta_rule", "engine.doctor",
    ),
}  # fmt: skip

# Keys of how gradients and AdamW's state are held, which may change and are reported.
HELD = ("train.main_grads_dtype", "train.exp_avg_dtype", "train.exp_avg_sq_dtype", "train.optimizer_offload_fraction")

# Keys that decide what is trained, on what and how.
FIXED: tuple[str, ...] = (
    "run.seed", "model.family", "model.init", "model.arch", "model.resize_embeddings", "model.freeze", "packing.mode", "packing.budget", "data.train",
    "data.eval", "data.labels", "data.template", "data.literal_tags", "data.special_tokens", "data.codec", "data.overlong", "data.shuffle", "data.lookahead", "data.augment", "data.augment_variants",
    "data.blank_answers", "data.bundled", "data.video_fps", "data.max_frames", "data.min_pixels", "data.max_pixels",
    "data.video_max_pixels", "train.global_batch", "train.lr", "train.min_lr", "train.lr_scale", "train.warmup_steps",
    "train.schedule", "train.decay_steps", "train.optimizer", "train.momentum", "train.matrix_lr_scale", "train.weight_decay", "train.beta1", "train.beta2", "train.eps", "train.clip_grad",
    "train.loss", "train.beta", "train.reference", "train.label_smoothing", "train.simpo_gamma", "train.desirable_weight", "train.undesirable_weight", "train.center_rewards", "train.aux_loss", "train.z_loss", "train.mtp_loss", "train.speech_loss", "train.residual_loss", "distill.teacher", "distill.top_k", "distill.temperature", "distill.weight", "embed.pooling", "embed.temperature", "embed.dimensions", "embed.instruction", "embed.template", "lora.rank", "lora.alpha", "lora.rslora", "lora.dora", "lora.rank_pattern", "lora.alpha_pattern", "lora.b_lr_scale", "lora.dropout", "lora.keep_dropout", "lora.targets",
    "lora.parts", "lora.whole_parts", "lora.init", "lora.merge_first", "lora.base_dtype", "engine.precision", "engine.fp8", "engine.fp8_recipe",
    "rl.algorithm", "rl.samples", "rl.updates", "rl.temperature", "rl.top_p", "rl.max_new_tokens", "rl.clip_low", "rl.clip_high",
    "rl.length_norm", "rl.std_norm", "rl.kl", "rl.reference", "rl.dynamic_sampling", "rl.overlong_buffer", "rl.mask_truncated", "rl.entropy",
    "rl.importance", "rl.importance_cap", "rl.rewards", "rl.reward_model", "rl.on_reward_error", "rl.rollout", "rl.vllm.max_model_len", "rl.vllm.options",
    "rl.router_replay", "rl.ahead",
)  # fmt: skip

# Where rows lie; which rows they are is known by their digests (zoo.data.sources.identity).
_PLACES = ("path", "hub", "name", "revision", "split", "root", "rows")
_MISSING = object()  # a key that a saved recipe does not have
_SHOWN = 6  # changes that a message names; of more, the run is another experiment
_FEW = 4  # changes that tell what the other experiment is
_TELLING = (
    "model.family", "model.init", "train.loss", "lora.rank", "data.train", "train.lr", "train.global_batch", "packing.budget",
)  # fmt: skip


@dataclass(frozen=True)
class Change:
    """A key whose value differs from the checkpoint's recipe; a `free` one needs no consent, but is reported."""

    key: str
    old: object
    new: object
    free: bool = False

    def __str__(self) -> str:
        return f"{self.key}: {shown_value(self.old)} there, {shown_value(self.new)} here"

    @property
    def plain_key(self) -> str:
        """The key of the recipe: that of the whole list, where an entry of it differs."""
        return self.key.partition("[")[0]

    def accepted(self, recipe: Recipe) -> bool:
        """Whether the recipe allows it, by its key or a section of it."""
        return self.free or any(f"{self.plain_key}.".startswith(f"{name}.") for name in recipe.run.accept_changes)


def changes(saved: JsonMapping, recipe: Recipe) -> list[Change]:
    """The keys that may not change, or are of how state is held, and whose values differ from the recipe saved with a checkpoint.

    `model.arch` is left to the description that the checkpoint itself has of its model. A key that the saved recipe does not
    have is skipped.

    Args:
        saved: config.yaml of the checkpoint, as nested dicts; {} where it is lost.
    """
    differing: list[Change] = []
    now = asdict(recipe)
    for key in FIXED:
        old, new = _value(saved, key), _value(now, key)
        if old is _MISSING or key == "model.arch" or (key == "engine.fp8_recipe" and not recipe.engine.fp8):
            continue
        if key in ("data.train", "data.eval"):
            differing += _changed_entries(key, old or [], new)
        elif not _same(key, old, new):
            planned = key == "train.global_batch" and "batch" in recipe.parallel.planned
            differing.append(Change(key, old, new, free=planned))
    for key in HELD:
        old, new = _value(saved, key), _value(now, key)
        if old is not _MISSING and old != new:
            differing.append(Change(key, old, new, free=True))
    return differing


def refuse_unwanted(folder: Path, checkpoints: Sequence[Path], recipe: Recipe) -> None:
    """UserError where a run folder has checkpoints and run.resume=false."""
    if checkpoints and not recipe.run.resume:
        raise UserError(
            f"run.resume=false: {folder} holds {checkpoints[-1].name} of an earlier run; "
            "give another run.dir, or move that folder away"
        )


def changes_from(checkpoint: Path, recipe: Recipe) -> tuple[JsonMapping, list[Change]]:
    """The recipe that a checkpoint was saved with, {} where it has none, and how this one differs (`changes`).

    Raises:
        UserError: its config.yaml is not what a run writes there.
    """
    config = checkpoint / "config.yaml"
    saved = read_recipe(str(config.absolute())).tree if config.is_file() else {}
    with reading_back(config, "take another checkpoint"):
        return saved, changes(saved, recipe)


def refuse(where: str, changed: Sequence[Change], recipe: Recipe, saved_recipe: str | None = None) -> None:
    """ConfigError for changes that the recipe does not allow.

    Args:
        saved_recipe: name of the recipe that the checkpoint was saved under, where it is known.
    """
    wrong = [change for change in changed if not change.accepted(recipe)]
    if not wrong:
        return
    keys_changed = list(dict.fromkeys(change.plain_key for change in wrong))
    if len(keys_changed) > _SHOWN:
        telling = [change for change in wrong if change.plain_key in _TELLING]
        telling = sorted(telling, key=lambda change: _TELLING.index(change.plain_key))[:_FEW] or wrong[:_FEW]
        others = f"; and {len(wrong) - len(telling)} more keys differ" if len(wrong) > len(telling) else ""
        names = ""
        if saved_recipe not in (None, recipe.recipe):
            names = f" (recipe {printable(str(saved_recipe), 100)} there, {recipe.recipe} here)"
        raise ConfigError(
            f"{where} belongs to another experiment{names}: {'; '.join(map(str, telling))}{others}; give this one a "
            "folder of its own: run.dir=FOLDER"
        )
    shown = "; ".join(map(str, wrong[:_SHOWN]))
    more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""  # entries of one list
    raise ConfigError(
        f"{where} was saved under another recipe ({shown}{more}); take the old values, allow the new ones with "
        f"run.accept_changes=[{','.join(keys_changed)}], or use another run.dir"
    )


def _changed_entries(key: str, old: list[object], new: list[object]) -> Iterator[Change]:
    """Entries of data, without where their rows lie: which rows they are is known by their digests."""
    before, after = ([_plain(entry, key) for entry in entries] for entries in (old, new))
    weighted = any("weight" in entry for entry in (*before, *after))
    if len(after) < len(before) or (len(after) > len(before) and weighted):
        yield Change(key, old, new)
        return
    for number, (old_values, new_values) in enumerate(zip(before, after, strict=False)):
        for name in sorted({*old_values, *new_values}):
            if old_values.get(name) != new_values.get(name):
                yield Change(f"{key}[{number}].{name}", old_values.get(name), new_values.get(name))


def _plain(entry: object, key: str) -> JsonObject:
    """What an entry says but for its place, defaults left out."""
    default, parsed = parse_entry("", key), parse_entry(entry, key)
    names = [name for name in vars(parsed) if name != "rows" and name not in _PLACES]
    return {name: getattr(parsed, name) for name in names if getattr(parsed, name) != getattr(default, name)}


def _same(key: str, old: Any, new: Any) -> bool:
    if key in ("model.init", "lora.init", "lora.merge_first") and old is not None and new is not None:
        return old == new or expanded(old).resolve() == expanded(new).resolve()
    if keys(Recipe)[key].type == "list[str]":  # sets of names
        return sorted(map(str, old or [])) == sorted(new)
    return bool(old == new)


def _value(tree: JsonMapping, key: str) -> Any:
    """The value at a dotted key of nested mappings; _MISSING where there is none."""
    value: Any = tree
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return _MISSING
        value = value[name]
    return value
