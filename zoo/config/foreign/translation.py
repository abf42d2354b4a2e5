"""What other trainers' settings come to here: a recipe that comes with zoo, and the keys to set in it.

Refusals tell it of a file, and of all unknown keys of a command line at once.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence

from zoo.config.entries import unknown_keys
from zoo.config.files import as_path
from zoo.config.foreign import data_sets
from zoo.config.foreign.model_settings import read_model, size_of
from zoo.config.foreign.reader import Reader, Translation, accepts, flattened, leaf, program_of, typed
from zoo.config.foreign.training_settings import read_batch, read_choices, read_schedule
from zoo.config.layers.foreign import NAMES, foreign_hint, foreign_name
from zoo.config.layers.keys import keys, shown_value
from zoo.config.layers.layer import Edit, Layer
from zoo.config.layers.reader import UnreadableError, read_text, read_yaml
from zoo.config.layers.tree import read_leaves, together
from zoo.config.recipes.chain import CHOICES, FILE_KEYS
from zoo.config.recipes.matrix import recipe_names
from zoo.config.schema import Recipe
from zoo.errors import ConfigError
from zoo.types import JsonMapping

type Load = Callable[[str, list[str]], object]

# Names that trainers and zoo have in common, zoo's within a section.
_SAME = {
    name.rpartition(".")[2]: name
    for name in (
        "run.seed", "train.weight_decay", "train.beta", "train.steps", "train.epochs", "train.schedule", "data.shuffle",
        "train.warmup_steps", "train.clip_grad", "train.label_smoothing", "train.simpo_gamma", "train.eps", "data.max_pixels", "data.min_pixels", "data.video_max_pixels",
    )
}  # fmt: skip
_BY_ITSELF = (
    "bf16", "tf32", "bf16_full_eval", "pure_bf16", "deepspeed", "fsdp", "fsdp_config", "zero_stage", "use_distributed_optimizer", "ddp_timeout",
    "do_train", "do_eval", "packing", "sample_packing", "neat_packing", "padding_free", "pad_to_sequence_len", "group_by_length", "eval_sample_packing",
    "ddp_find_unused_parameters", "remove_unused_columns", "overwrite_output_dir", "overwrite_cache", "sequence_parallel",
    "tokenizer_type", "preprocessing_num_workers", "dataset_num_proc", "trust_remote_code", "processor_type", "skip_prepare_dataset", "dataset_prepared_path",
    "load_from_cache_file", "moe_grouped_gemm", "cross_entropy_loss_fusion", "fused", "device", "special_tokens", "use_hf", "save_safetensors",
    "overlap_grad_reduce", "overlap_param_gather", "merges_file", "checkpoint_files",
)  # fmt: skip
_NOTED = ("packing.budget", "train.beta", "machine.nodes")  # whose values are the same, whatever there is to know
_ATTENTION = NAMES["flash_attn"]
_FUSED = NAMES["use_liger_kernel"]
_ARCHITECTURE = NAMES["swiglu"]
_TRAIN_SETS = (
    "dataset", "datasets", "dataset_name", "train_files", "train_file", "custom_train_dataset_path", "train_dataset", "data_path", "train_data_path", "train_data",
)  # fmt: skip
_EVAL_SETS = (
    "eval_dataset", "val_dataset", "test_datasets", "val_files", "validation_file", "custom_val_dataset_path", "valid_data_path",
)  # fmt: skip


def translate(
    flat: JsonMapping, load: Load, program: str = "", recipe: str | None = None, zoo_keys: JsonMapping | None = None
) -> Translation:
    """The settings of another trainer, by dotted key, as zoo's.

    Args:
        load: resolves a recipe's name and overrides, and refuses keys without an effect.
        program: the trainer, where it is known: what it does by default is set, too.
        recipe: the recipe that the user has named; default: the one that fits the model and the method.
        zoo_keys: zoo's keys that the user has set beside them, which replace theirs.
    """
    zoo_keys = zoo_keys or {}
    left = {key: value for key, value in flat.items() if not _stands_for_one_of(zoo_keys, key)}
    if "model.init" in zoo_keys:  # which says what recipe fits
        left["model_name_or_path"] = zoo_keys["model.init"]
    reader = Reader(left, program, recipe)
    reader.translation.settings |= zoo_keys
    if recipe is None:
        reader.translation.instead = _other_verb(reader)
    read_schedule(reader)
    read_model(reader)
    _read_data(reader)
    read_batch(reader)
    read_choices(reader)
    for key, value in list(reader.left.items()):
        _read_other(reader.translation, key, value)
    reader.translation.open = {
        key: text for key, text in reader.translation.open.items() if key.partition("=")[0] not in zoo_keys
    }
    _keep_those_with_effect(reader.translation, load)
    return reader.translation


def _stands_for_one_of(zoo_keys: JsonMapping, key: str) -> bool:
    """Whether a foreign key means nothing else than one of zoo's that the user has set."""
    meaning = NAMES.get(foreign_name(key) or "")
    stands_for = {_SAME.get(leaf(key), ""), *(meaning.keys if meaning is not None and len(meaning.keys) == 1 else ())}
    lengths = {"train.steps", "train.epochs"}
    return not stands_for.isdisjoint({*zoo_keys, *(() if lengths.isdisjoint(zoo_keys) else lengths)})


def _other_verb(reader: Reader) -> str | None:
    """The command where the settings are not those of training: of answers, or of an export; else None."""
    names = {leaf(key): value for key, value in reader.left.items()}
    if not names.keys().isdisjoint((*_TRAIN_SETS, "learning_rate", "do_train")):
        return None
    model, adapter = (
        names.get("model_name_or_path") or names.get("model"),
        names.get("adapter_name_or_path") or names.get("adapters"),
    )
    source = shlex.quote(str(adapter or model))
    if "export_dir" in names and source:
        return f"zoo convert {source} {shlex.quote(str(names['export_dir']))}"
    if "infer_backend" in names:
        return f'zoo generate {source} "PROMPT"'
    return None


def _read_data(reader: Reader) -> None:
    folder, share = (
        reader.take("dataset_dir"),
        reader.take("val_size", "split_dataset_ratio", "val_set_size", "test_size"),
    )
    splits = {"data.train": reader.take("dataset_train_split"), "data.eval": reader.take("dataset_test_split")}
    subset = reader.take("dataset_config")
    made = [
        reader.left.pop(key) for key in list(reader.left) if key.startswith("dataset") and leaf(key) == "_component_"
    ]
    made_of = reader.left.pop("dataset.source", None)
    share = share if isinstance(share, float) and 0 < share < 1 else share or None
    for zoo_key, names in (("data.train", _TRAIN_SETS), ("data.eval", _EVAL_SETS)):
        sources = reader.take(*names) or (made_of if zoo_key == "data.train" else None)
        sets = data_sets.read_sets(sources, folder) if sources not in (None, [], "") else data_sets.Sets([], [], [])
        entries = list(sets.entries)
        reader.translation.without += sets.unread
        more = (
            {"split": splits[zoo_key], "name": subset}
            if any(isinstance(entry, dict) and "hub" in entry for entry in entries)
            else {}
        )
        if zoo_key == "data.train" and isinstance(share, float):
            more["held_out"], share = share, None
        more = {name: value for name, value in more.items() if value is not None}
        if more:
            entries = [{**(entry if isinstance(entry, dict) else {"path": entry}), **more} for entry in entries]
        if entries:
            reader.set(zoo_key, entries[0] if len(entries) == 1 else entries)
        unknown = [*sets.unknown, *(map(str, made) if zoo_key == "data.train" and not entries else [])]
        if unknown:
            reader.decide(
                f"{zoo_key}=FILE", f"the rows of {', '.join(unknown)} (JSONL, parquet, a folder, or {{hub: ID}})"
            )
    if isinstance(share, float | int) and share:
        reader.decide("held out", f"{share}: held_out: SHARE in an entry of data.train, or data.eval=FILE")


def _read_other(translation: Translation, key: str, value: object) -> None:
    """A key that stands for one of zoo's, or for none."""
    last, meaning = leaf(key), NAMES.get(foreign_name(key) or "")
    if key in keys(Recipe) or key == "task":  # of the command line
        translation.settings[key] = value
    elif last in _SAME and accepts(_SAME[last], value):
        translation.settings.setdefault(_SAME[last], value)
    elif (
        last in _BY_ITSELF
        or last.startswith("liger_")
        or meaning in (_ATTENTION, _FUSED, _ARCHITECTURE)
        or value is False
        or value in ("", [], {})
        or (last.endswith("_strategy") and value in ("steps", "no"))
    ):
        translation.done.append(key)
    elif meaning is not None and len(meaning.keys) == 1:
        target = meaning.keys[0]
        if target in translation.settings or target.startswith(("data.train", "parallel.plan", "run.resume")):
            translation.done.append(key)
        elif (not meaning.note or target in _NOTED) and accepts(target, value):
            translation.settings[target] = value
        else:
            translation.open[key] = f"{shown_value(value)}: {meaning}"
    elif meaning is not None:
        translation.open[key] = f"{shown_value(value)}: {meaning}"
    else:
        translation.without.append(key)


def _keep_those_with_effect(translation: Translation, load: Load) -> None:
    """Leave out what the recipe would refuse, as it says itself."""
    if translation.recipe == "RECIPE":
        return
    size = size_of(str(translation.settings.get("model.init", "")))
    while True:
        settings = {key: value for key, value in translation.settings.items() if key != "model.init"}
        texts = [f"{key}={typed(value)}" for key, value in settings.items()]
        try:
            load(translation.recipe, [*texts, *([f"size={size}"] if size and "size" not in settings else [])])
            return
        except ConfigError as error:
            lines = str(error).split("\n")
            refused = {key: line for key in settings for line in lines if f"{key}=" in line}
            if not refused:
                return
            for key, line in refused.items():
                del translation.settings[key]
                if "it has no effect" in line:
                    translation.done.append(f"{key} (no effect here)")
                else:
                    translation.open[key] = line.strip()


def refuse_foreign_file(name_or_path: str, load: Load, overrides: Layer) -> None:
    """ConfigError for a file that was written for another trainer, with the command that does the same here.

    The overrides behind the file, in zoo's names or in those of the trainer, replace what the file says.
    """
    path = as_path(name_or_path)
    if path is None or not path.is_file():
        return
    try:
        tree = read_yaml(read_text(path))
    except (UnreadableError, OSError):
        return  # which reading it says
    program = program_of(tree) if isinstance(tree, dict) and all(isinstance(key, str) for key in tree) else None
    if program is None:
        return
    leaves, unknown = read_leaves(Recipe, overrides.tree)
    typed = leaves | {key: overrides.tree[key] for key in CHOICES if key in overrides.tree}
    typed |= {edit.path: edit.value for edit in overrides.edits}
    foreign = {wrong.key: wrong.value for wrong in unknown if wrong.key not in CHOICES}
    names = {leaf(key) for key in foreign}
    flat = {key: value for key, value in flattened(tree) if leaf(key) not in names} | foreign
    raise ConfigError(
        f"{name_or_path}: a file of {program}, and no recipe; what comes to the same here:\n{translate(flat, load, program, zoo_keys=typed)}"
    )


def refuse_unknown(recipe: str, layers: Sequence[Layer], load: Load) -> None:
    """ConfigError for keys that there are not, of the user's files and the command line together.

    Args:
        recipe: its name, as the user gave it.
        layers: the user's files, and the overrides last.
        load: as `translate` takes it.
    """
    problems, foreign = list[str](), 0
    for layer in layers:
        where = f"{layer.origin}: " if layer.origin else ""
        tree = {key: value for key, value in layer.tree.items() if key not in FILE_KEYS}
        leaves, unknown = read_leaves(Recipe, tree)
        problems += [f"{where}{wrong.problem}" for wrong in unknown]
        problems += [f"{where}{problem}" for problem in _entry_mistakes(leaves, layer.edits)]
        foreign += sum(foreign_hint(wrong.key) is not None for wrong in unknown if not layer.origin)
    if not problems:
        return
    answer = together(problems)
    if len(problems) > 1 and foreign > 1 and recipe in recipe_names():
        leaves, unknown = read_leaves(Recipe, layers[-1].tree)  # zoo's own mappings whole
        flat = leaves | {wrong.key: wrong.value for wrong in unknown}
        answer += f"\nwhat comes to the same here:\n{translate(flat, load, recipe=recipe)}"
    raise ConfigError(answer)


def _entry_mistakes(leaves: JsonMapping, edits: Sequence[Edit]) -> Iterator[str]:
    """Mistakes in the keys of entries of data.train and data.eval."""
    for key in ("data.train", "data.eval"):
        value = leaves.get(key)
        entries = value if isinstance(value, list | tuple) else [value]
        for entry in entries:
            if isinstance(entry, Mapping):
                yield from (f"{key}: {problem}" for problem in unknown_keys(entry))
        for edit in edits:
            if edit.key == key:
                yield from (f"{key}[{edit.index}]: {problem}" for problem in unknown_keys(edit.rest[:1]))
