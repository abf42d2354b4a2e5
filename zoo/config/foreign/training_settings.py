"""Batches, schedules and choices of another trainer's settings."""

from __future__ import annotations

from zoo.config.foreign.reader import Reader, number
from zoo.config.layers.foreign import NAMES

_SCHEDULES = ("cosine", "linear", "constant", "wsd")
_ONE_PASS = (
    "per_device_train_batch_size", "micro_batch_size", "train_micro_batch_size_per_gpu", "batch_size", "per_device_batch_size", "micro_batch_size_per_gpu",
)  # fmt: skip
_LOSSES = {
    "sigmoid": "dpo", "ipo": "ipo", "simpo": "simpo", "orpo": "orpo", "kto": "kto", "kto_pair": "kto",
}  # fmt: skip
_LABELS = {"last_round": "last", "all": "all", "default": "assistant"}  # ms-swift's loss_scale


def read_batch(reader: Reader) -> None:
    """Rows of an update: those of one forward pass times those accumulated, on one rank."""
    whole = reader.take("global_batch_size", "total_batch_size", "effective_batch_size", "train_batch_size")
    rows = reader.take(*_ONE_PASS)
    passes = reader.take(
        "gradient_accumulation_steps", "accumulate_grad_batches", "gradient_accumulation", "grad_accum"
    )
    if isinstance(whole, int):
        reader.set("train.global_batch", whole)
        if rows is not None or passes is not None:
            reader.translation.done.append("micro_batch_size")
    elif isinstance(rows, int) or isinstance(passes, int):
        rows, passes = (value if isinstance(value, int) else 1 for value in (rows, passes))
        reader.set("train.global_batch", rows * passes)
        reader.decide("train.global_batch", f"{rows} x {passes} rows are of one rank; multiply by the number of GPUs")
    reader.is_done("per_device_eval_batch_size", "eval_batch_size")


def read_schedule(reader: Reader) -> None:
    """Length, rate, warm-up and decay."""
    steps = number(reader.take("max_steps", "train_iters", "num_train_steps", "max_iters"))
    epochs = number(reader.take("num_train_epochs", "num_epochs", "max_epochs", "total_epochs", "epochs"))
    if steps is not None and steps > 0:
        reader.set("train.steps", steps)
    elif epochs is not None and epochs > 0:
        reader.set("train.epochs", epochs)
    rate = number(reader.take_for("train.lr") or reader.take("lr"))
    if rate is not None:
        reader.set("train.lr", rate)
    _warm_up(reader, reader.translation.settings.get("train.steps"))
    name = str(reader.take("lr_scheduler_type", "lr_scheduler", "scheduler", "lr_decay_style") or "").lower()
    name = name or str(reader.left.pop("lr_scheduler._component_", "")).rpartition(".")[2].lower()
    schedule = next((known for known in _SCHEDULES if known in name), None)
    if schedule is not None:
        reader.set("train.schedule", schedule)
    elif name:
        reader.decide("train.schedule", f"{name}: of {', '.join(_SCHEDULES)} the nearest")
    _least_rate(reader, schedule, name, rate)


def _warm_up(reader: Reader, steps: int | None) -> None:
    ratio = number(reader.take("warmup_ratio", "lr_warmup_fraction", "lr_warmup_steps_ratio", "warmup_fraction"))
    if ratio is None:
        return
    if isinstance(steps, int) or not ratio:
        reader.set("train.warmup_steps", round(ratio * (steps or 0)))
    else:
        reader.decide("train.warmup_steps", f"a number of steps: {ratio:g} of those of the run")


def _least_rate(reader: Reader, schedule: str | None, name: str, rate: float | None) -> None:
    """The rate that the schedule ends with; theirs is 0 where nothing is said, and a constant one has none."""
    least = number(reader.take("min_lr", "min_learning_rate", "lr_end"))
    share = number(reader.take("min_lr_rate", "min_lr_ratio", "cosine_min_lr_ratio"))
    if least is None and share is not None and rate is not None:
        least = float(f"{share * rate:.6g}")
    if schedule == "constant":
        if least is not None or share is not None:
            reader.translation.done.append("min_lr")
    elif least is not None:
        reader.set("train.min_lr", least)
    elif share is not None:
        reader.decide("train.min_lr", f"{share:g} x train.lr")
    elif schedule is not None and "min_lr" not in name:
        reader.set("train.min_lr", 0.0)


def read_choices(reader: Reader) -> None:
    """Settings whose values are other words here."""
    optimizer = str(reader.take("optim", "optimizer") or reader.left.pop("optimizer._component_", "")).lower()
    if optimizer:
        reader.set("train.optimizer", "muon" if "muon" in optimizer else "adamw")
        if "8bit" in optimizer:
            reader.set("train.exp_avg_dtype", "fp8")
            reader.set("train.exp_avg_sq_dtype", "fp8")
        if "adam" not in optimizer and "muon" not in optimizer:
            reader.decide("train.optimizer", f"{optimizer}: adamw or muon")
    _precision(reader)
    checkpointing = [reader.take(key) for key in NAMES if NAMES[key].keys == ("engine.recompute",)]
    if any(value not in (None, False, "none", {}) for value in checkpointing):
        reader.set("engine.recompute", "selective" if "selective" in map(str, checkpointing) else "full")
    overlong = str(reader.take("truncation_strategy", "excess_length_strategy") or "").lower()
    if overlong:
        reader.set("data.overlong", "truncate_text" if overlong.startswith(("left", "right", "trunc")) else "drop")
    _labels(reader)
    loss = str(reader.take("pref_loss", "loss_type") or "").lower()
    if loss in _LOSSES:
        reader.set("train.loss", _LOSSES[loss])
    elif loss:
        reader.decide("train.loss", f"{loss}: dpo, ipo, simpo, orpo or kto")
    _trackers(reader)


def _precision(reader: Reader) -> None:
    dtype = str(reader.take("torch_dtype", "dtype", "mixed_precision") or "").lower()
    if "float32" in dtype or "fp32" in dtype:
        reader.set("engine.precision", "fp32")
    elif reader.take("fp16") is True or dtype in ("fp16", "float16", "half"):
        reader.decide("engine.precision", "fp16: bf16 in its place, which a GPU has by itself")
    elif dtype:
        reader.translation.done.append("dtype")


def _labels(reader: Reader) -> None:
    """Which tokens are learnt."""
    if reader.take("train_on_prompt", "train_on_inputs", "train_on_input") is True:
        reader.set("data.labels", "all")
    if reader.take("mask_history") is True:
        reader.set("data.labels", "last")
    scale = str(reader.take("loss_scale") or "")
    if scale in _LABELS:
        reader.set("data.labels", _LABELS[scale])
    elif scale:
        reader.decide(
            "loss_scale", f"{scale}: a weight of messages or rows (docs/data.md), or data.labels=assistant, last or all"
        )
    for name in ("assistant_only_loss", "completion_only_loss"):
        if (only := reader.take(name)) is not None:
            reader.set("data.labels", "assistant" if only else "all")


def _trackers(reader: Reader) -> None:
    project = reader.take("wandb_project")
    reader.take("wandb_name", "wandb_entity", "wandb_watch", "wandb_log_model", "wandb_run_id")
    named = reader.take("report_to", "log_with")
    tools = {str(tool).lower() for tool in (named if isinstance(named, list) else [named or "all"])}
    known = {"wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio", "swanlab": "swanlab", "comet_ml": "comet"}
    for tool, key in known.items():
        if tool in tools or (tool == "wandb" and project):
            reader.set(f"log.{key}", project or "zoo")
    if tools == {"none"}:
        reader.set("log.tensorboard", False)
    for other in sorted(tools - {"none", "all", "tensorboard", *known}):
        reader.translation.without.append(f"report_to={other}")
