"""Keys of a run: where it lives, on what it runs, and where its metrics go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zoo.config.layers.keys import ALWAYS, Bounds, number, section, setting
from zoo.config.schema import conditions

Recompute = Literal["none", "selective", "full"]

# A key and its default with the bounds of a number stay on one line.
# fmt: off


@section
@dataclass(frozen=True, kw_only=True, repr=False)
class RunConfig:
    """Where a run lives and what makes it repeatable."""

    dir: str | None = setting(None, when=ALWAYS)
    """run folder; default runs/<recipe>-<size>"""
    seed: int = number(1234, 0, 2**32 - 1, when=ALWAYS)
    """seeds weights, data order and dropout"""
    resume: bool = setting(True, when=ALWAYS)
    """resume from the newest whole checkpoint of run.dir when there is one"""
    accept_changes: list[str] = setting(list, when=ALWAYS)
    """keys or sections in which a resumed run may differ from its checkpoint: train.lr, data"""
    deterministic: bool = setting(False, when=ALWAYS)
    """the same bits from the same seed on a GPU too, by slower kernels"""
    hang_timeout: float = number(10.0, 0, 1e6, when=ALWAYS)
    """minutes without progress on any rank after which the run ends; 0: not watched"""
    callbacks: list[str] = setting(list, when=ALWAYS)
    """module:Class, file.py:Class or names that packages announce, called at steps, evaluations and saves (docs/callbacks.md)"""
    stage: str | None = setting(None, when=ALWAYS)
    """folder on a local disk that checkpoints are written to first, and copied on from to run.dir beside training; null: straight to run.dir"""
    save_within: float = number(110.0, above=0, most=1e6, when=ALWAYS)
    """seconds after SIGTERM, SIGUSR1, SIGHUP or SIGQUIT that a run has to save; after them it ends unsaved"""


@section
@dataclass(frozen=True, kw_only=True, repr=False)
class MachineConfig:
    """What a run is planned for; `hardware=` fills it in."""

    gpu: str | None = setting(None, when=ALWAYS)
    """kind of GPU, a name that `zoo list` shows; null: not known"""
    gpus: int | None = number(None, 1, 4096, when=ALWAYS)
    """GPUs of a node; null: a machine without"""
    memory_gb: float | None = number(None, above=0, most=1e6, when=ALWAYS)
    """memory of a GPU, in units of 10^9 bytes"""
    nodes: int = number(1, 1, 10**5, when=ALWAYS)
    """nodes of the run"""
    host_memory_gb: float | None = number(None, above=0, most=1e7, when=ALWAYS)
    """memory of a node's host, in units of 10^9 bytes; null: not known, except on the machine that trains"""


@section
@dataclass(frozen=True, kw_only=True, repr=False)
class ParallelConfig:
    """Sizes of the process groups; data parallel is what is left of the world size."""

    tp: int = number(1, 1, 10**5, when=ALWAYS)
    """tensor parallel ranks"""
    pp: int = number(1, 1, 10**5, when=ALWAYS)
    """pipeline stages"""
    vpp: int = number(1, 1, 10**5, when=conditions.PIPELINE, off=1)
    """model chunks per pipeline stage (interleaved schedule when > 1)"""
    cp: int = number(1, 1, 10**5, when=ALWAYS)
    """context parallel ranks"""
    cp_split: Literal["auto", "zigzag"] = setting("auto", when=conditions.CONTEXT_PARALLEL, off="auto")
    """what context-parallel ranks hold. auto: whole samples, in rows where each rank then has as much work, else chunks of each | zigzag: chunks of each"""
    ep: int = number(1, 1, 10**5, when=conditions.EXPERTS, off=1)
    """expert parallel ranks"""
    etp: int = number(1, 1, 10**5, when=conditions.EXPERTS, off=1)
    """tensor parallel ranks inside an expert"""
    stage_layers: list[int] = setting(list, when=conditions.PIPELINE, bounds=Bounds(least=1, most=1e5))
    """decoder layers of each pipeline stage, pp * vpp numbers in the model's order; default: even, one fewer at the ends"""
    dispatch: Literal["alltoall", "deepep", "hybridep"] = setting("alltoall", when=conditions.EXPERT_EXCHANGE, off="alltoall")
    """how tokens come to the ranks of their experts. alltoall: zoo's exchange | deepep, hybridep: megatron-core's flex dispatcher with the package deep_ep"""
    overlap_param_gather: bool = setting(True, when=conditions.NO_GRAPHS, off=False)
    """on GPUs, without engine.cuda_graphs: the next forward pass begins while updated weights are gathered from the data-parallel ranks"""
    sp: bool | None = setting(None, when=conditions.TENSOR_PARALLEL)
    """sequence parallel; default: on when tp > 1 and the model has experts"""
    plan: list[str] = setting(list, when=ALWAYS)
    """keys chosen so that the model fits: tp, pp, cp, ep, recompute, memory (AdamW's moments), offload (their share on the host), graphs (engine.cuda_graphs), batch"""
    planned: list[str] = setting(list, when=ALWAYS)
    """keys that planning has chosen; a run writes it"""


@section
@dataclass(frozen=True, kw_only=True, repr=False)
class EngineConfig:
    """How the model is executed."""

    backend: Literal["auto", "te", "torch"] = setting("auto", when=ALWAYS)
    """auto | te | torch; auto is te for FP8 by tensor, and else torch"""
    precision: Literal["fp32", "bf16"] | None = setting(None, when=ALWAYS)
    """fp32 | bf16; default: bf16 on a GPU, fp32 on the CPU"""
    fp8: bool = setting(False, when=ALWAYS)
    """linears of attention and dense MLPs in FP8; needs bf16"""
    fp8_recipe: Literal["blockwise", "tensorwise"] = setting("blockwise", when=conditions.FP8)
    """blockwise: a scale for 128 values, weight gradients in bf16; on Hopper, without te | tensorwise: a scale for a tensor; needs te"""
    recompute: Recompute = setting("none", when=ALWAYS)
    """none | selective (MLP, experts) | full: computed again in backward"""
    cuda_graphs: bool = setting(False, when=ALWAYS)
    """on a GPU, layers of dense decoders and vision towers are captured once for each size of row, and replayed: for rows so small that the host launches longer than the GPU computes"""
    threads: int | None = number(None, 1, 1024, when=ALWAYS)
    """CPU threads a rank; default: 1 beside a GPU, else cores / ranks"""
    delta_rule: Literal["auto", "flash_qla", "torch"] = setting("auto", when=conditions.LINEAR_ATTENTION, off="auto")
    """auto: flash-linear-attention | flash_qla: faster, a minute and a half to compile once; needs flash-qla | torch: plain and slow, where the fast kernel is refused on this GPU"""
    doctor: bool = setting(True, when=ALWAYS)
    """on a GPU, kernels are checked before training, once for this machine and shapes"""


@section
@dataclass(frozen=True, kw_only=True, repr=False)
class LogConfig:
    """Where metrics go, besides train.jsonl."""

    tensorboard: bool = setting(True, when=ALWAYS)
    """event files in run.dir/tensorboard"""
    wandb: str | None = setting(None, when=ALWAYS)
    """project name at Weights & Biases; default: not used"""
    mlflow: str | None = setting(None, when=ALWAYS)
    """experiment name at MLflow, which MLFLOW_TRACKING_URI places; default: not used"""
    trackio: str | None = setting(None, when=ALWAYS)
    """project name at Trackio; default: not used"""
    predictions: int = number(8, 0, 64, when=(conditions.EVALUATION, conditions.ANSWERS), off=0)
    """held-out rows whose greedy answers are shown at each evaluation, in predictions.jsonl and plots/predictions.png; 0: none"""
    prediction_tokens: int = number(64, 1, 10**5, when=(conditions.EVALUATION, conditions.ANSWERS, conditions.PREDICTIONS))
    """most tokens of such an answer"""
    slow_step: float = number(3.0, 0, 1e6, when=ALWAYS)
    """a step slower than so many times the running median is reported, with its cause; 0: never"""


# fmt: on
