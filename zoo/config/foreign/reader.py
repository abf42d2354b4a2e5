"""Files of other trainers, told from recipes by the names of their keys, and their settings while they are read."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from zoo.config.layers.foreign import NAMES, foreign_name
from zoo.config.layers.keys import keys, show_value
from zoo.config.layers.reader import UnreadableError, read_yaml
from zoo.config.layers.tree import schema_tree, set_key
from zoo.config.recipes.chain import FILE_KEYS
from zoo.config.schema import Recipe
from zoo.errors import ConfigError
from zoo.types import JsonMapping, JsonObject

# Program -> names that its files have, the more of them the surer. Of equal counts the first one is taken.
_NAMES: dict[str, str] = {
    "LLaMA-Factory": "finetuning_type cutoff_len dataset_dir neat_packing quantization_bit quantization_method stage overwrite_cache plot_loss val_size "
    "image_max_pixels video_max_pixels freeze_multi_modal_projector freeze_vision_tower pref_beta pref_loss do_train lora_target mask_history media_dir "
    "template max_samples preprocessing_num_workers include_effective_tokens_per_second flash_attn enable_liger_kernel",
    "ms-swift": "train_type tuner_type sft_type tuner_backend rlhf_type split_dataset_ratio attn_impl freeze_vit freeze_aligner freeze_llm vit_lr aligner_lr "
    "custom_train_dataset_path use_hf loss_scale padding_free target_modules val_dataset model_author truncation_strategy torch_dtype dataset_num_proc quant_method quant_bits",
    "axolotl": "base_model sequence_len sample_packing val_set_size datasets lora_target_linear num_epochs dataset_prepared_path adapter evals_per_epoch "
    "saves_per_epoch special_tokens chat_template flash_attention pad_to_sequence_len eval_sample_packing load_in_4bit load_in_8bit strict lora_target_modules",
    "Megatron-LM": "tensor_model_parallel_size pipeline_model_parallel_size train_iters lr_decay_iters micro_batch_size global_batch_size seq_length "
    "lr_warmup_fraction use_distributed_optimizer recompute_granularity expert_model_parallel_size data_path tokenizer_type",
    "TRL": "dataset_name use_peft lora_r lora_target_modules model_name_or_path dataset_text_field assistant_only_loss completion_only_loss attn_implementation max_length load_in_4bit dataset_config",
}  # fmt: skip
_SIGNS = {program: frozenset(names.split()) for program, names in _NAMES.items()}
# What no other program's files have: the last part of a key, or the first; and among names that several have, names of one alone.
_MARKS = {
    "_component_": "torchtune", "_target_": "NeMo", "actor_rollout_ref": "verl", "partial_pretrain": "verl",
    "adv_estimator": "verl",
}  # fmt: skip
_OWN = {
    "finetuning_type": "LLaMA-Factory", "train_type": "ms-swift", "tuner_type": "ms-swift", "sft_type": "ms-swift", "base_model": "axolotl",
}  # fmt: skip
_GENERAL = "transformers"  # whose names the others have, too
_ENOUGH = 2  # names that a file must have
_NAMED = re.compile(r"\$\{([\w.]+)\}")


class Reader:
    """Settings by dotted key, taken one topic after the other.

    Attributes:
        left: those that no topic has taken yet.
        program: the trainer, "" where it is not known.
        recipe: the recipe that the user has named, or None.
        translation: what they have come to.
    """

    def __init__(self, flat: JsonMapping, program: str, recipe: str | None) -> None:
        self.left = {key: _filled(value, flat) for key, value in flat.items() if value is not None}
        self.program, self.recipe = program, recipe
        self.translation = Translation(recipe or "RECIPE")

    def take(self, *names: str) -> Any:
        """The value of the first key with one of these names; all keys of these names are taken."""
        taken = [key for name in names for key in self.left if leaf(key) == name]
        values = [self.left.pop(key) for key in dict.fromkeys(taken)]
        return values[0] if values else None

    def take_for(self, zoo_key: str) -> Any:
        """As `take`, of all names that stand for a key of zoo alone."""
        taken = [key for key in self.left if (name := foreign_name(key)) and NAMES[name].keys == (zoo_key,)]
        values = [self.left.pop(key) for key in taken]
        return values[0] if values else None

    def set(self, key: str, value: object) -> None:
        """Set zoo's key, where nothing has set it."""
        self.translation.settings.setdefault(key, value)

    def decide(self, key: str, text: str) -> None:
        """Leave something to the user."""
        self.translation.open[key] = text

    def is_done(self, *names: str) -> Any:
        """As `take`, of keys that need no counterpart: they are listed as such."""
        self.translation.done += [name for name in names if any(leaf(key) == name for key in self.left)]
        return self.take(*names)


def _filled(value: object, flat: JsonMapping) -> Any:
    """A text with the values of the keys that it names, as `${output_dir}/weights`."""
    if not isinstance(value, str) or "${" not in value:
        return value
    return _NAMED.sub(lambda match: str(flat.get(match[1], match[0])), value)


def number(value: object) -> float | int | None:
    """A value that is a number, else None."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


@dataclass
class Translation:
    """Another trainer's settings as zoo's.

    Attributes:
        recipe: the recipe that comes with zoo, "RECIPE" where none is known to fit.
        settings: zoo's keys and values.
        open: foreign keys and what has to be decided about them.
        done: foreign keys that need no counterpart: what they ask for is so by itself.
        without: foreign keys that have no counterpart.
        instead: the command where the settings are not those of training.
    """

    recipe: str
    settings: JsonObject = field(default_factory=dict)
    open: dict[str, str] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    without: list[str] = field(default_factory=list)
    instead: str | None = None

    @property
    def command(self) -> str:
        """The command line that does so."""
        if self.instead is not None:
            return self.instead
        settings = (f"{key}={typed(value)}" for key, value in self.settings.items())
        return " ".join(["zoo train", f"recipe={self.recipe}", *map(shlex.quote, settings)])

    def __str__(self) -> str:
        lines = [f"  {self.command}"]
        if self.instead is not None:
            return lines[0]
        if self.open:
            lines.append("to decide:")
            lines += [f"  {key}: {text}" for key, text in self.open.items()]
        if self.done:
            lines.append(f"so by itself: {', '.join(dict.fromkeys(self.done))}")
        if self.without:
            lines.append(f"without a counterpart here: {', '.join(dict.fromkeys(self.without))}")
        return "\n".join(lines)


def typed(value: object) -> str:
    """A value as one types it behind `key=`: texts that YAML would read otherwise are quoted."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {typed(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(typed, value))}]"
    if not isinstance(value, str):
        return show_value(value)
    try:
        plain = read_yaml(f"[{value}]") == [value]
    except UnreadableError:
        plain = False
    return value if plain else json.dumps(value, ensure_ascii=False)


def accepts(key: str, value: object) -> bool:
    """Whether zoo's key takes the value."""
    tree = schema_tree(Recipe)
    try:
        set_key(tree, key, value)
    except ConfigError:
        return False
    return True


def program_of(tree: JsonMapping) -> str | None:
    """The trainer that a file was written for, by its keys; None for a recipe, and for what no trainer's names are in."""
    if "base" in tree or "resolved" in tree or not tree:
        return None
    flat = dict(flattened(tree))
    for key in flat:
        parts = key.split(".")
        if (mark := _MARKS.get(parts[-1]) or _MARKS.get(parts[0])) is not None:
            return mark
    known = {*keys(Recipe), *FILE_KEYS}
    names = {leaf(key) for key in flat if key not in known}
    foreign = [name for name in names if foreign_name(name) or any(name in signs for signs in _SIGNS.values())]
    if len(foreign) < _ENOUGH or len(foreign) <= sum(key in known for key in flat):
        return None
    program_of_name = next((program for name, program in _OWN.items() if name in names), None)
    if program_of_name is not None:
        return program_of_name
    best = max(_SIGNS, key=lambda program: len(_SIGNS[program] & names))
    return best if _SIGNS[best] & names else _GENERAL


def flattened(tree: JsonMapping, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Dotted keys and values of nested dicts."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def leaf(key: str) -> str:
    """A dotted key's last part, as names of trainers are compared."""
    return key.rpartition(".")[2].replace("-", "_").lower()
