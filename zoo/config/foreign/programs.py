"""Files of other trainers, told from recipes by the names of their keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from zoo.config.layers.foreign import foreign_name
from zoo.config.layers.keys import keys
from zoo.config.recipes.chain import FILE_KEYS
from zoo.config.schema import Recipe
from zoo.types import JsonMapping

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
    "_component_": "torchtune",
    "_target_": "NeMo",
    "actor_rollout_ref": "verl",
    "partial_pretrain": "verl",
    "adv_estimator": "verl",
}
_OWN = {
    "finetuning_type": "LLaMA-Factory", "train_type": "ms-swift", "tuner_type": "ms-swift", "sft_type": "ms-swift", "base_model": "axolotl",
}  # fmt: skip
_GENERAL = "transformers"  # whose names the others have, too
_ENOUGH = 2  # names that a file must have


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
