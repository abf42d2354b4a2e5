"""What other trainers' settings come to here: a recipe that comes with zoo, and the keys to set in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zoo.config.foreign import data_sets, models
from zoo.config.foreign.answer import Translation, takes
from zoo.config.foreign.programs import leaf
from zoo.config.layers.foreign import NAMES, foreign_name
from zoo.config.layers.keys import keys, show_value, shown_value
from zoo.config.schema import Recipe
from zoo.errors import ConfigError

type Load = Callable[[str, list[str]], object]

# Names that trainers and zoo have in common, zoo's within a section.
_SAME = {
    name.rpartition(".")[2]: name
    for name in (
        "run.seed", "train.weight_decay", "train.lr", "train.min_lr", "train.beta", "train.steps", "train.epochs", "train.schedule",
        "train.warmup_steps", "train.clip_grad", "train.label_smoothing", "train.simpo_gamma", "train.eps", "data.max_pixels", "data.min_pixels", "data.video_max_pixels",
    )
}  # fmt: skip
_SCHEDULES = ("cosine", "linear", "constant", "wsd")
_BY_ITSELF = (
    "bf16", "tf32", "bf16_full_eval", "pure_bf16", "deepspeed", "fsdp", "fsdp_config", "zero_stage", "use_distributed_optimizer", "ddp_timeout",
    "do_train", "do_eval", "packing", "sample_packing", "neat_packing", "padding_free", "pad_to_sequence_len", "group_by_length", "eval_sample_packing",
    "ddp_find_unused_parameters", "remove_unused_columns", "overwrite_output_dir", "overwrite_cache", "use_distributed_optimizer", "sequence_parallel",
    "tokenizer_type", "preprocessing_num_workers", "dataset_num_proc",
)  # fmt: skip
_NOTED = ("packing.budget",)  # whose values are the same, whatever there is to know
_ATTENTION = NAMES["flash_attn"]
_FUSED = NAMES["use_liger_kernel"]


def translate(
    flat: Mapping[str, Any], load: Load, program: str = "", recipe: str | None = None
) -> Translation:
    """The settings of another trainer, by dotted key, as zoo's.

    Args:
        load: resolves a recipe's name and overrides, and refuses keys without an effect.
        program: the trainer, where it is known: what it does by default is set, too.
        recipe: the recipe that the user has named; default: the one that fits the model and the method.
    """
    return _Reader(dict(flat), load, program, recipe).read()


class _Reader:
    """Takes a file's keys one topic after the other."""

    def __init__(self, flat: dict[str, Any], load: Load, program: str, recipe: str | None) -> None:
        self.left = {key: value for key, value in flat.items() if value is not None}
        self.load, self.program, self.recipe = load, program, recipe
        self.found = Translation(recipe or "RECIPE")

    def read(self) -> Translation:
        self._model()
        self._data()
        self._batch()
        self._schedule()
        self._choices()
        for key, value in list(self.left.items()):
            self._other(key, value)
        self._keep_those_with_effect()
        return self.found

    def take(self, *names: str) -> Any:
        """The value of the first key with one of these names; all keys of these names are done."""
        taken = [key for name in names for key in self.left if leaf(key) == name]
        values = [self.left.pop(key) for key in dict.fromkeys(taken)]
        return values[0] if values else None

    def take_for(self, zoo_key: str) -> Any:
        """As `take`, of all names that stand for a key of zoo."""
        taken = [key for key in self.left if (name := foreign_name(key)) and NAMES[name].keys == (zoo_key,)]
        values = [self.left.pop(key) for key in taken]
        return next((value for value in values if isinstance(value, str)), None)

    def set(self, key: str, value: Any) -> None:
        self.found.settings.setdefault(key, value)

    # ------------------------------------------------------------ topics

    def _model(self) -> None:
        """The model, the method, and the recipe that has both."""
        left = self.left
        components = {
            key: str(left.pop(key)) for key in list(left) if leaf(key) in ("_component_", "_target_")
        }
        init = self.take_for("model.init")
        names = [
            str(value)
            for value in (
                init,
                self.take("template", "chat_template"),
                self.take_for("model.family"),
                components.get("model._component_"),
            )
            if value
        ]
        stage = str(self.take("stage", "rlhf_type", "rl", "task_type") or "sft").lower()
        kind = self.take(
            "finetuning_type",
            "train_type",
            "tuner_type",
            "sft_type",
            "adapter",
            "peft_type",
            "use_peft",
            "use_lora",
        )
        tuned = str(kind or "").lower()
        adapters = "lora" in tuned or tuned == "true" or "lora" in components.get("model._component_", "")
        adapters = adapters or (
            kind is None and any(foreign_name(key) in ("lora_rank", "lora_r") for key in left)
        )
        quantised = [
            self.take(name)
            for name in (
                "load_in_4bit",
                "load_in_8bit",
                "quantization_bit",
                "quant_bits",
                "quant_method",
                "quantization_method",
            )
        ]
        if tuned == "qlora" or any(quantised):
            self.found.open["quantised weights"] = (
                "they are not trained here; adapters stand on bf16 weights, or on 8 bits: lora.base_dtype=fp8"
            )
        if init is not None:
            self.set("model.init", init)
        model = models.model_of(names)
        if self.recipe is None and model is not None:
            method = models.method_of(stage)
            fitting = None if method is None else models.recipe_of(model, method.task, adapters)
            if fitting is None:
                self.found.open["stage"] = f"{stage}: no recipe does this; `zoo list` shows what there is"
                fitting = models.recipe_of(model, None, adapters)
            elif method is not None and method.loss is not None:
                self.set("train.loss", method.loss)
            self.found.recipe = fitting or self.found.recipe
        elif self.recipe is None:
            said = ", ".join(names) or "no model is named"
            self.found.open["RECIPE"] = f"one of `zoo list` for the model ({said})"
        if self.recipe is not None and stage != "sft":
            self.found.open["stage"] = f"{stage}: task=dpo or task=reward beside the recipe's name"
        self._adapters(adapters)
        self._frozen(model, adapters)

    def _adapters(self, adapters: bool) -> None:
        targets = self.take(
            "lora_target", "target_modules", "lora_target_modules", "lora_target_linear", "lora_attn_modules"
        )
        rank = self.take("lora_rank", "lora_r", "lora_dim")
        alpha = self.take("lora_alpha")
        if not adapters:
            return
        if rank is None and self.recipe is not None:
            self.found.open["lora.rank"] = "the width of the adapters"
        elif rank is not None:
            self.set("lora.rank", rank)
            if alpha is None and self.program == "LLaMA-Factory" and isinstance(rank, int):
                alpha = 2 * rank
        if alpha is not None:
            self.set("lora.alpha", alpha)
        named = targets.split(",") if isinstance(targets, str) else targets
        if isinstance(named, list) and not {"all", "all-linear", "all_linear"} & set(map(str, named)):
            self.set("lora.targets", [str(name).strip() for name in named])

    def _frozen(self, model: models.Model | None, adapters: bool) -> None:
        """Parts that stay as they are; two trainers freeze towers where nothing is said."""
        tower = self.take("freeze_vision_tower", "freeze_vit", "freeze_vision")
        merger = self.take("freeze_multi_modal_projector", "freeze_aligner", "freeze_mm_mlp_adapter")
        language = self.take("freeze_language_model", "freeze_llm")
        if adapters or model is None:
            return
        by_default = self.program in ("LLaMA-Factory", "ms-swift")
        towers = [part for part in model.family.parts if part != "language"]
        frozen = towers if (by_default if tower is None else tower) else []
        inner = [
            part for part, prefixes in model.family.inner.items() if prefixes[0].partition(".")[0] in towers
        ]
        if frozen and merger is False:
            for part in inner:
                self.set(f"train.lr_scale.{part}", 1.0)
        elif merger and not frozen:
            frozen = inner
        if frozen := [*frozen, *(["language"] if language else [])]:
            self.set("model.freeze", frozen)

    def _data(self) -> None:
        folder, share = (
            self.take("dataset_dir"),
            self.take("val_size", "split_dataset_ratio", "val_set_size", "test_size"),
        )
        for zoo_key, names in (
            ("data.train", ("dataset", "datasets", "dataset_name", "train_files", "train_file", "custom_train_dataset_path", "train_dataset", "data_path", "train_data_path")),
            ("data.eval", ("eval_dataset", "val_dataset", "test_datasets", "val_files", "validation_file", "custom_val_dataset_path", "valid_data_path")),
        ):  # fmt: skip
            given = self.take(*names)
            if given in (None, [], ""):
                continue
            entries, unknown = data_sets.entries(given, folder)
            self.found.without += data_sets.samples(given)
            held_out = (
                share if zoo_key == "data.train" and isinstance(share, float) and 0 < share < 1 else None
            )
            if held_out is not None:
                entries = [
                    {**(one if isinstance(one, dict) else {"path": one}), "held_out": held_out}
                    for one in entries
                ]
                share = None
            if entries:
                self.set(zoo_key, entries[0] if len(entries) == 1 else entries)
            if unknown:
                self.found.open[f"{zoo_key}=FILE"] = (
                    f"the rows of {', '.join(unknown)} (JSONL, parquet, a folder, or {{hub: ID}})"
                )
        if isinstance(share, float | int) and share:
            self.found.open["held out"] = (
                f"{share}: held_out: SHARE in an entry of data.train, or data.eval=FILE"
            )

    def _batch(self) -> None:
        """Rows of an update: those of one forward pass times those accumulated, on one rank."""
        whole = self.take("global_batch_size", "total_batch_size", "effective_batch_size", "train_batch_size")
        parts = (
            "per_device_train_batch_size",
            "micro_batch_size",
            "train_micro_batch_size_per_gpu",
            "batch_size",
            "per_device_batch_size",
        )
        one = self.take(*parts, "micro_batch_size_per_gpu")
        times = self.take(
            "gradient_accumulation_steps", "accumulate_grad_batches", "gradient_accumulation", "grad_accum"
        )
        if isinstance(whole, int):
            self.set("train.global_batch", whole)
        elif isinstance(one, int) or isinstance(times, int):
            one, times = (value if isinstance(value, int) else 1 for value in (one, times))
            self.set("train.global_batch", one * times)
            self.found.open["train.global_batch"] = (
                f"{one} x {times} rows are of one rank; multiply by the number of GPUs"
            )
        if self.take("per_device_eval_batch_size", "eval_batch_size") is not None:
            self.found.done.append("per_device_eval_batch_size")

    def _schedule(self) -> None:
        self._direct(
            "train.steps",
            self.take("max_steps", "train_iters", "num_train_steps", "max_iters"),
            lambda value: value > 0,
        )
        epochs = self.take("num_train_epochs", "num_epochs", "max_epochs", "total_epochs", "epochs")
        if "train.steps" not in self.found.settings:
            self._direct("train.epochs", epochs, lambda value: value > 0)
        ratio, steps = (
            self.take("warmup_ratio", "lr_warmup_fraction", "lr_warmup_steps_ratio", "warmup_fraction"),
            self.found.settings.get("train.steps"),
        )
        if isinstance(ratio, float | int) and not isinstance(ratio, bool):
            if isinstance(steps, int) or not ratio:
                self.set("train.warmup_steps", round(ratio * (steps or 0)))
            else:
                self.found.open["train.warmup_steps"] = f"a number of steps: {ratio:g} of those of the run"
        name = str(
            self.take("lr_scheduler_type", "lr_scheduler", "scheduler", "lr_decay_style") or ""
        ).lower()
        schedule = next((one for one in _SCHEDULES if one in name), None)
        if schedule is not None:
            self.set("train.schedule", schedule)
        elif name:
            self.found.open["train.schedule"] = f"{name}: of {', '.join(_SCHEDULES)} the nearest"
        if schedule == "constant":
            self.take("min_lr", "min_lr_ratio")
        elif schedule is not None and "min_lr" not in name and not any("min_lr" in key for key in self.left):
            self.set("train.min_lr", 0.0)

    def _direct(self, key: str, value: Any, fits: Callable[[Any], bool]) -> None:
        if isinstance(value, int | float) and not isinstance(value, bool) and fits(value):
            self.set(key, value)

    def _choices(self) -> None:
        """Settings whose values are other words here."""
        optimizer = str(self.take("optim", "optimizer") or "").lower()
        if optimizer:
            self.set("train.optimizer", "muon" if "muon" in optimizer else "adamw")
            if "8bit" in optimizer:
                self.set("train.exp_avg_dtype", "fp8")
                self.set("train.exp_avg_sq_dtype", "fp8")
            if "adam" not in optimizer and "muon" not in optimizer:
                self.found.open["train.optimizer"] = f"{optimizer}: adamw or muon"
        dtype = str(self.take("torch_dtype", "dtype", "mixed_precision") or "").lower()
        if "float32" in dtype or "fp32" in dtype:
            self.set("engine.precision", "fp32")
        if self.take("fp16") is True or dtype in ("fp16", "float16", "half"):
            self.found.open["engine.precision"] = "fp16: bf16 in its place, which a GPU has by itself"
        checkpointing = [self.take(key) for key in NAMES if NAMES[key].keys == ("engine.recompute",)]
        if any(value not in (None, False, "none", {}) for value in checkpointing):
            self.set("engine.recompute", "selective" if "selective" in map(str, checkpointing) else "full")
        overlong = str(self.take("truncation_strategy", "excess_length_strategy") or "").lower()
        if overlong:
            self.set(
                "data.overlong",
                "truncate_text" if overlong.startswith(("left", "right", "trunc")) else "drop",
            )
        on_prompt = self.take("train_on_prompt", "train_on_inputs", "train_on_input")
        if on_prompt is True:
            self.set("data.labels", "all")
        if self.take("mask_history") is True:
            self.set("data.labels", "last")
        self._loss()
        self._trackers()

    def _loss(self) -> None:
        loss = str(self.take("pref_loss", "loss_type") or "").lower()
        named = {
            "sigmoid": "dpo",
            "ipo": "ipo",
            "simpo": "simpo",
            "orpo": "orpo",
            "kto": "kto",
            "kto_pair": "kto",
        }
        if loss in named:
            self.set("train.loss", named[loss])
        elif loss:
            self.found.open["train.loss"] = f"{loss}: dpo, ipo, simpo, orpo or kto"

    def _trackers(self) -> None:
        project = self.take("wandb_project")
        self.take("wandb_name", "wandb_entity", "wandb_watch", "wandb_log_model", "wandb_run_id")
        given = self.take("report_to", "log_with")
        tools = {str(one).lower() for one in (given if isinstance(given, list) else [given or "all"])}
        named = [
            tool for tool in ("wandb", "mlflow", "trackio") if tool in tools or (tool == "wandb" and project)
        ]
        for tool in named:
            self.set(f"log.{tool}", project or "zoo")
        if tools == {"none"}:
            self.set("log.tensorboard", False)
        for other in tools - {"none", "all", "wandb", "mlflow", "trackio", "tensorboard"}:
            self.found.without.append(f"report_to={other}")

    def _other(self, key: str, value: Any) -> None:
        """A key that stands for one of zoo's, or for none."""
        name, found = foreign_name(key), self.found
        last = leaf(key)
        meaning = NAMES.get(name or "")
        if key in keys(Recipe) or key == "task":  # of the command line
            found.settings[key] = value
        elif last in _SAME and takes(_SAME[last], value):
            self.set(_SAME[last], value)
        elif (
            last in _BY_ITSELF
            or meaning in (_ATTENTION, _FUSED)
            or value is False
            or value in ("", [], {})
            or (last.endswith("_strategy") and value in ("steps", "no"))
        ):
            found.done.append(key)
        elif meaning is not None and len(meaning.keys) == 1:
            target = meaning.keys[0]
            if target in found.settings or target.startswith(("data.train", "parallel.plan", "run.resume")):
                found.done.append(key)
            elif (not meaning.note or target in _NOTED) and takes(target, value):
                found.settings[target] = value
            else:
                found.open[key] = f"{shown_value(value)}: {meaning}"
        elif meaning is not None:
            found.open[key] = f"{shown_value(value)}: {meaning}"
        else:
            found.without.append(key)

    def _keep_those_with_effect(self) -> None:
        """Leave out what the recipe would refuse, as it says itself."""
        found = self.found
        if found.recipe == "RECIPE":
            return
        size = models.size_of(str(found.settings.get("model.init", "")))
        while True:
            given = {key: value for key, value in found.settings.items() if key != "model.init"}
            texts = [f"{key}={show_value(value)}" for key, value in given.items()]
            try:
                self.load(found.recipe, [*texts, *([f"size={size}"] if size and "size" not in given else [])])
                return
            except ConfigError as error:
                refused = [key for key in given if f"{key}=" in str(error)]
                if not refused:
                    return
                for key in refused:
                    del found.settings[key]
                    found.done.append(f"{key} (no effect here)")
