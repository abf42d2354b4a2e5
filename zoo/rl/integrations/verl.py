"""`zoo.Engine` as a model engine of verl: importing this module registers it there under the backend `zoo`.

verl imports it in each worker where `actor_rollout_ref.model.external_lib` names it. docs/verl.md walks through the settings.
What verl hands over is nested tensors (a row for each sequence) and a loss for rows of these; zoo packs them, and gives
log-probabilities back in verl's place, which is that of the token before.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.utils.py_functional import append_to_dict
from verl.workers.config import ActorConfig, EngineConfig
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry

from zoo.config.compose import load_recipe, recipe_for_weights
from zoo.config.locate import locate, read_arch
from zoo.config.schema import Recipe
from zoo.errors import UserError
from zoo.model.meta_model import family_of
from zoo.rl.engine import Engine
from zoo.types import JsonObject

REFUSED = ("distillation_use_topk", "distillation_only", "calculate_sum_pi_squared", "enable_routing_replay")
PRECISION = {"bfloat16": "bf16", "float32": "fp32"}

_open: list[Engine] = []  # engines of this process, which share their process groups


@dataclass
class ZooEngineConfig(EngineConfig):
    """verl's settings of an engine, and zoo's.

    Attributes:
        recipe: a name that `zoo list` shows, or a file; None: zoo's defaults for the model's family.
        overrides: of the recipe, such as `parallel.tp=2`, `model.freeze=[vision]`, `engine.recompute=full`.
    """

    strategy: str = "zoo"
    recipe: str | None = None
    overrides: list[str] = field(default_factory=list)


@dataclass
class ZooActorConfig(ActorConfig):
    """verl's settings of an actor or a reference that zoo computes: `_target_: zoo.rl.integrations.verl.ZooActorConfig`."""

    strategy: str = "zoo"
    zoo: ZooEngineConfig = field(default_factory=ZooEngineConfig)
    use_remove_padding: bool = True
    use_rollout_log_probs: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.engine = self.zoo


@EngineRegistry.register(model_type="language_model", backend="zoo", device=["cuda", "cpu"])
class ZooEngine(BaseEngine):
    """verl's interface of an engine, on `zoo.Engine`.

    Micro-batches are zoo's: rows of up to `packing.budget` tokens, which is verl's max_token_len_per_gpu. verl's losses divide by
    the numbers of the whole batch, so that they do not depend on it. Engines of a process share process groups: an actor and its
    reference have the same parallel sizes.
    """

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        """Open the model. verl asks for this rank's place right after, before it calls `initialize`."""
        super().__init__()
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
        self.mode: str | None = None
        self._saved: list[Path] = []
        self.engine = self._opened()

    def _opened(self) -> Engine:
        trains = not self.engine_config.forward_only
        recipe = recipe_of(self.model_config, self.engine_config, self.optimizer_config if trains else None)
        engine = Engine.open(recipe, train=trains, beside=_open[0] if _open else None)
        _open.append(engine)
        return engine

    def initialize(self) -> None:
        """Begin with the weights of the model's folder, and leave the device where verl's settings say so."""
        if self.engine.closed:
            self.engine = self._opened()
        if not self.engine_config.forward_only:
            self.engine.advance_schedule()  # verl moves it after its first step
        offload = self.is_param_offload_enabled
        self.to("cpu", model=offload, optimizer=self.is_optimizer_offload_enabled, grad=offload)

    def close(self) -> None:
        """Free the model; verl's workers end with their processes and do not call it."""
        if self.engine in _open:
            _open.remove(self.engine)
        self.engine.close()

    @property
    def is_param_offload_enabled(self) -> bool:
        return bool(self.engine_config.param_offload)

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return bool(self.engine_config.optimizer_offload) and not self.engine_config.forward_only

    def train_mode(self, **options: object) -> BaseEngineCtx:
        return _TrainMode(self, mode="train", **options)

    def eval_mode(self, **options: object) -> BaseEngineCtx:
        return BaseEngineCtx(self, mode="eval", **options)

    def optimizer_zero_grad(self) -> None:
        self.engine.clear_gradients()

    def optimizer_step(self) -> float:
        """Update the weights by the gradients at hand, unless these are not finite; returns their norm."""
        norm, _ = self.engine.update(advance=False)
        return norm

    def lr_scheduler_step(self) -> float:
        """Move the schedule by one; returns the learning rate of the step that was taken."""
        rate = self.engine.learning_rate
        self.engine.advance_schedule()
        return rate

    def get_data_parallel_rank(self) -> int:
        return self.engine.dp_rank

    def get_data_parallel_size(self) -> int:
        return self.engine.dp_size

    def get_data_parallel_group(self) -> torch.distributed.ProcessGroup:
        return self.engine.dp_group

    def is_mp_src_rank_with_outputs(self) -> bool:
        return self.engine.counts_outputs

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move weights, optimizer state and gradients to the host ("cpu") or back to the device."""
        super().to(device=device, model=model, optimizer=optimizer, grad=grad)
        trains = not self.engine_config.forward_only
        there = "cpu" if device == "cpu" else "cuda"
        self.engine.to(there, model=model, optimizer=optimizer and trains, gradients=grad and trains)

    def disable_adapter(self) -> AbstractContextManager[None]:
        return self.engine.without_adapters() if self.engine.recipe.lora.rank else nullcontext()

    def get_per_tensor_param(self, **_: object) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """Published names and whole tensors, adapters merged: the rollout gets a model without adapters."""
        self.engine.to("cuda", optimizer=False, gradients=False)
        return self.engine.hf_weights(), None

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **_: object,
    ) -> None:
        """Save into a folder that zoo takes for a run's; folders saved earlier by this engine go, but for so many."""
        if hdfs_path is not None:
            raise UserError(f"hdfs_path={hdfs_path}: zoo saves to a folder alone; set no HDFS folder")
        self.engine.save(local_path, global_step)
        self._saved.append(Path(local_path))
        while max_ckpt_to_keep and len(self._saved) > max_ckpt_to_keep:
            former = self._saved.pop(0)
            if dist.get_rank() == 0:
                shutil.rmtree(former, ignore_errors=True)

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True, **_: object
    ) -> None:
        """Go on from what `save_checkpoint` wrote; the folder stays, whatever `del_local_after_load` says."""
        if local_path is not None:
            self.engine.load(local_path)

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> JsonObject:
        """Log-probabilities, losses and metrics of this replica's rows, and, unless `forward_only`, the gradients.

        Returns:
            `model_output` with nested `log_probs` (and `entropy`), a row for each sequence: at each token the next one's, 0 at the
            last and where the loss does not look; `loss` and `metrics`: lists with one entry for each micro-batch.
        """
        for name in REFUSED:
            if tu.get_non_tensor_data(data, key=name, default=False):
                raise UserError(f"the batch asks for {name}, which zoo's engine of verl does not have")
        batch, lengths = padded(data)
        heat = _temperature(data, len(lengths))
        entropy = bool(tu.get_non_tensor_data(data, key="calculate_entropy", default=False))
        mask = data["loss_mask"]
        tokens = (mask.values() if mask.is_nested else mask).sum().to(self.engine.device)
        dist.all_reduce(tokens, group=self.get_data_parallel_group())  # that the loss looks at, of all replicas
        tu.assign_non_tensor(data, batch_num_tokens=int(tokens), dp_size=self.engine.dp_size)
        outputs = _Found(loss_function, data, lengths, self.get_data_parallel_group())
        if forward_only:
            values = {"logprobs": self.engine.logprobs(batch, temperature=heat)}
            if entropy:
                values["entropy"] = self.engine.entropy(batch, temperature=heat)
            if loss_function is not None:
                outputs(values["logprobs"], {"row": batch["row"]}, values.get("entropy"))
            outputs.outputs = _nested(values, lengths)
        else:
            scale = 1.0 / self.engine.dp_size  # verl's losses carry dp_size, as DDP takes the mean
            self.engine.train_step(batch, outputs, scale, temperature=heat, entropy=entropy, update=False)
        return {"model_output": outputs.outputs, "loss": outputs.losses, "metrics": outputs.one_each()}


class _TrainMode(BaseEngineCtx):
    """verl's, which leaves no gradients behind."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.zero_grad_on_exit or kind is not None:
            self.engine.optimizer_zero_grad()
        super().__exit__(kind, error, trace)


@dataclass
class _Found:
    """verl's loss as `zoo.Engine.train_step` calls it, and what it gave."""

    loss_function: Callable[..., Any] | None
    data: TensorDict
    lengths: list[int]
    group: torch.distributed.ProcessGroup
    outputs: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    metrics: JsonObject = field(default_factory=dict)

    def __call__(self, logprobs: Tensor, batch: JsonObject, entropy: Tensor | None = None) -> Tensor:
        rows = batch["row"].cpu()
        part = tu.index_select_tensor_dict(self.data, rows).to(logprobs.device)
        values = {"logprobs": logprobs} | ({} if entropy is None else {"entropy": entropy})
        output = _nested(values, [self.lengths[row] for row in rows.tolist()])
        assert self.loss_function is not None
        loss, metrics = self.loss_function(model_output=output, data=part, dp_group=self.group)
        self.losses.append(float(loss.detach()))
        append_to_dict(self.metrics, metrics)
        return loss

    def one_each(self) -> JsonObject:
        """The metrics, those that verl aggregates over replicas with one value: these have micro-batches in different numbers."""
        return {
            name: Metric(value.aggregation, value.aggregate()) if isinstance(value, Metric) else value
            for name, value in self.metrics.items()
        }


def recipe_of(model_config: Any, engine_config: Any, optimizer_config: Any | None) -> Recipe:
    """zoo's recipe of verl's settings; `engine_config.overrides` come last.

    Raises:
        UserError: a setting that zoo does not have.
    """
    if engine_config.dtype not in PRECISION:
        raise UserError(f"dtype={engine_config.dtype}: zoo trains in {' or '.join(PRECISION)}")
    folder = model_config.local_path or model_config.path
    budgets = (engine_config.max_token_len_per_gpu, engine_config.infer_max_token_len_per_gpu)
    overrides = [
        f"model.init={folder}",
        f"engine.precision={PRECISION[engine_config.dtype]}",
        f"run.seed={engine_config.seed}",
        *(f"packing.budget={max(known)}" for known in [[b for b in budgets if b]] if known),
        *(_training(optimizer_config) if optimizer_config is not None else ()),
    ]
    if model_config.lora_rank:
        overrides += [f"lora.rank={model_config.lora_rank}", f"lora.alpha={model_config.lora_alpha}"]
    overrides += engine_config.overrides
    if engine_config.recipe is not None:
        return load_recipe(engine_config.recipe, overrides)
    family = family_of(read_arch(locate(str(folder)).files)).name
    return recipe_for_weights(str(folder), family, overrides)


def _training(config: Any) -> list[str]:
    """The overrides of an optimizer's settings."""
    steps, warmup = config.total_training_steps, config.lr_warmup_steps
    if warmup is None or warmup < 0:
        warmup = int(config.lr_warmup_steps_ratio * max(steps, 0))
    schedule = config.get("lr_scheduler_type", config.get("lr_decay_style", "constant"))
    return [
        f"train.lr={config.lr}",
        f"train.weight_decay={config.weight_decay}",
        f"train.beta1={config.betas[0]}",
        f"train.beta2={config.betas[1]}",
        f"train.clip_grad={config.clip_grad}",
        f"train.warmup_steps={warmup}",
        f"train.schedule={schedule if steps > 0 else 'constant'}",
        f"train.steps={max(steps, 1)}",
    ]


def padded(data: TensorDict) -> tuple[JsonObject, list[int]]:
    """verl's rows as `zoo.Engine` takes them: padded on the right, with the tokens that a response has; and their lengths."""
    ids = data["input_ids"]
    lengths = ids.offsets().diff().tolist()
    padded_ids = torch.nested.to_padded_tensor(ids, padding=0)
    places = torch.arange(padded_ids.shape[1], device=padded_ids.device)[None]
    ends = torch.tensor(lengths, device=padded_ids.device)[:, None]
    batch: JsonObject = {"input_ids": padded_ids, "attention_mask": places < ends, "row": torch.arange(len(lengths))}
    response_lengths = _response_lengths(data)
    if response_lengths is not None:
        batch["loss_mask"] = (places < ends) & (places >= ends - response_lengths.to(padded_ids.device)[:, None])
    if "multi_modal_inputs" in data:
        batch["media"] = [tu.unwrap_non_tensor_data(media) or None for media in data["multi_modal_inputs"]]
    return batch, lengths


def _response_lengths(data: TensorDict) -> Tensor | None:
    """(B,) tokens at the end of each row that are its response; None where verl does not say so, as in supervised training."""
    responses = data.get("responses", None)
    if responses is None:
        return None
    if responses.is_nested:
        return responses.offsets().diff()
    return data["attention_mask"][:, -responses.shape[1] :].sum(1)


def _temperature(data: TensorDict, rows: int) -> float | Tensor:
    heat = tu.get(data, "temperature", 1.0)
    return heat.reshape(-1).expand(rows) if isinstance(heat, Tensor) else float(heat)


def _nested(values: dict[str, Tensor], lengths: list[int]) -> dict[str, Tensor]:
    """(B, T) values at their own tokens as verl's nested ones, each at the token before; 0 at the last."""
    names = {"logprobs": "log_probs", "entropy": "entropy"}
    nested = {}
    for name, value in values.items():
        shifted = torch.nn.functional.pad(value[:, 1:], (0, 1))
        rows = [row[:length] for row, length in zip(shifted, lengths, strict=True)]
        nested[names[name]] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    return nested
