"""Keys of a run: where it lives, on what it runs, how it optimises, and where its metrics go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zoo.config.layers.keys import ALWAYS, Bounds, number, section, setting
from zoo.config.schema import conditions

Recompute = Literal["none", "selective", "full"]
StateDtype = Literal["fp32", "bf16", "fp8"]  # how an optimizer's state is held

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
    profile: str | None = setting(None, when=ALWAYS)
    """steps FIRST:LAST of which PyTorch's profiler writes a trace and a table of the most expensive operations to run.dir/profile: 20:22; null: none"""
    profile_ranks: list[int] = setting(lambda: [0], when=conditions.PROFILE, bounds=Bounds(least=0, most=1e5))
    """ranks that are profiled"""


@section
@dataclass(frozen=True, kw_only=True, repr=False)
class HubConfig:
    """Where the export is pushed at the end."""

    repo: str | None = setting(None, when=conditions.EXPORT)
    """model repository owner/name on the Hugging Face hub, made before training if it isn't there; default: the export stays here"""
    private: bool = setting(True, when=(conditions.EXPORT, conditions.HUB_REPO))
    """a new repository is private, and one that is public is refused; false: a new one is public"""


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
    towers: Literal["own", "shared"] = setting("own", when=(conditions.MEDIA, conditions.SHARED_MEDIA, conditions.NO_GRAPHS), off="own")
    """who encodes a row's media. own: the ranks that train on the row | shared: images, frames and clips are dealt by cost over the ranks that exchange tokens of experts and the stages of a pipeline, and rows are packed to equal cost of the decoder"""
    sp: bool | None = setting(None, when=conditions.TENSOR_PARALLEL)
    """sequence parallel; default: on when tp > 1 and the model has experts"""
    plan: list[str] = setting(list, when=ALWAYS)
    """keys chosen so that the model fits: tp, pp, cp, ep, recompute, memory (AdamW's moments), offload (their share on the host), graphs (engine.cuda_graphs), towers, batch"""
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
    offload_activations: bool = setting(False, when=conditions.FULL_RECOMPUTE, off=False)
    """under full recompute, inputs of layers wait in host memory for the backward pass: for rows of 65,536 tokens and more, which copies hardly slow down"""
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
    swanlab: str | None = setting(None, when=ALWAYS)
    """project name at SwanLab; default: not used"""
    comet: str | None = setting(None, when=ALWAYS)
    """project name at Comet; default: not used"""
    predictions: int = number(8, 0, 64, when=(conditions.EVALUATION, conditions.ANSWERS), off=0)
    """held-out rows whose greedy answers are shown at each evaluation, in predictions.jsonl and plots/predictions.png; 0: none"""
    prediction_tokens: int = number(64, 1, 10**5, when=(conditions.EVALUATION, conditions.ANSWERS, conditions.PREDICTIONS))
    """most tokens of such an answer"""
    slow_step: float = number(3.0, 0, 1e6, when=ALWAYS)
    """a step slower than so many times the running median is reported, with its cause; 0: never"""
    straggler_steps: int = number(20, 0, 10**6, when=ALWAYS)
    """steps in a row that the other ranks wait for a rank, after which it is named, once; 0: never"""
    part_norms_every: int = number(0, 0, 10**9, when=ALWAYS)
    """steps between gradient norms by part of the model (grad_norm_vision, grad_norm_experts ... in train.jsonl), as before clipping; 0: none"""


@section
@dataclass(frozen=True, kw_only=True, repr=False)
class TrainConfig:
    """The optimisation."""

    steps: int | None = number(None, 1, 10**9, when=ALWAYS)
    """optimizer steps; default: from epochs"""
    epochs: float | None = number(None, above=0, most=1e6, when=ALWAYS)
    """passes over the training rows, when steps is not given"""
    global_batch: int = number(8, 1, 10**6, when=ALWAYS)
    """rows per optimizer step, all ranks together (packed rows under thd)"""
    micro_batch: int = number(1, 1, 10**5, when=conditions.PADDED, off=1)
    """rows per forward pass and rank (packing.mode=none; a packed row counts as 1)"""
    loss: Literal["nll", "dpo", "ipo", "simpo", "orpo", "kto", "reward", "embed"] = setting("nll", when=ALWAYS)
    """nll: of the answers' tokens | of preference pairs, kto: of labelled answers | reward: of pairs, for a model that scores answers (docs/preference.md) | embed: of queries and candidates (docs/retrieval.md)"""
    beta: float = number(0.1, above=0, most=1e6, when=conditions.PREFERENCES)
    """how much a difference of log-probabilities counts for a loss of preferences"""
    reference: str = setting("start", when=conditions.REFERENCE)
    """dpo, ipo, kto: start (the run's first weights) | base (the weights without adapters) | another model, as model.init names it | a reference.safetensors"""
    label_smoothing: float = number(0.0, 0, below=0.5, when=conditions.SMOOTHED)
    """dpo, simpo: share of pairs taken to be the wrong way round"""
    simpo_gamma: float = number(0.5, 0, 1e6, when=conditions.SIMPO)
    """simpo: the margin between the rewards of a pair"""
    desirable_weight: float = number(1.0, 0, 1e6, when=conditions.KTO)
    """kto: of desirable answers in the loss"""
    undesirable_weight: float = number(1.0, 0, 1e6, when=conditions.KTO)
    """kto: of the others"""
    center_rewards: float = number(0.0, 0, 1e6, when=conditions.REWARD)
    """reward: weight of the squared sum of a pair's scores, which keeps their mean at 0"""
    lr: float = number(1e-5, 0, 100, when=ALWAYS)
    """peak learning rate"""
    min_lr: float = number(0.0, 0, 100, when=conditions.FALLING_RATE)
    """learning rate that the schedule would reach one update after the last; constant has none"""
    lr_scale: dict[str, float] = setting(dict, when=ALWAYS, bounds=Bounds(least=0, most=1e6))
    """factor of lr for a part of the model"""
    warmup_steps: int = number(0, 0, 10**9, when=ALWAYS)
    """linear warm-up in updates, the last one at lr; a run of fewer updates never reaches lr"""
    schedule: Literal["cosine", "constant", "linear", "wsd"] = setting("cosine", when=ALWAYS)
    """after the warm-up: cosine or linear to min_lr | constant: lr | wsd: lr, then linear to min_lr over decay_steps"""
    decay_steps: int | None = number(None, 1, 10**9, when=conditions.WSD)
    """wsd: the last updates, in which the rate falls; default: a tenth of the steps"""
    optimizer: Literal["adamw", "muon"] = setting("adamw", when=ALWAYS)
    """adamw | muon: Muon for the matrices of decoder and towers, AdamW for embeddings, heads, routers, norms and biases"""
    momentum: float = number(0.95, 0, below=1, when=conditions.MUON)
    """Muon"""
    matrix_lr_scale: float = number(1.0, above=0, most=1e3, when=conditions.MUON)
    """learning rate of Muon's matrices, as a factor of lr"""
    weight_decay: float = number(0.0, 0, 100, when=ALWAYS)
    """decoupled weight decay (not on norms and biases)"""
    beta1: float = number(0.9, 0, below=1, when=ALWAYS)
    """AdamW"""
    beta2: float = number(0.95, 0, below=1, when=ALWAYS)
    """AdamW"""
    eps: float = number(1e-8, above=0, most=1, when=ALWAYS)
    """AdamW"""
    exp_avg_dtype: StateDtype = setting("fp32", when=ALWAYS)
    """how AdamW's first moment and Muon's momentum are held: fp32 | bf16 | fp8 (8 bits, 128 values share an exponent)"""
    exp_avg_sq_dtype: StateDtype = setting("fp32", when=ALWAYS)
    """the same of AdamW's second moment"""
    optimizer_offload_fraction: float = number(0.0, 0, 1, when=ALWAYS)
    """share of AdamW's state that is in the host's memory, and updated there by the rank's cores"""
    main_grads_dtype: Literal["fp32", "bf16"] = setting("fp32", when=ALWAYS)
    """fp32 | bf16: how gradients are kept, and summed over micro-batches; ranks' are summed in fp32 either way; bf16 needs engine.precision=bf16"""
    clip_grad: float = number(1.0, 0, 1e9, when=ALWAYS)
    """largest global gradient norm; 0 turns clipping off"""
    on_bad_step: Literal["stop", "skip"] = setting("stop", when=ALWAYS)
    """a bad step is never applied; stop (after bad_steps) | skip (up to skip_limit)"""
    bad_steps: int = number(3, 1, 10**6, when=conditions.STOPS)
    """bad steps in a row at which on_bad_step=stop ends the run"""
    skip_limit: int = number(20, 1, 10**6, when=ALWAYS)
    """bad steps among the last 4 * skip_limit steps that end the run, or that are a new level of the loss"""
    on_new_level: Literal["stop", "take"] = setting("stop", when=(conditions.SKIPS, conditions.SPIKES), off="stop")
    """stop | take: after skip_limit spikes in a row, their level is the normal one; losses that are not finite still stop"""
    spike: float = number(10.0, 0, 1e9, when=ALWAYS)
    """a loss this many spreads above the median of good steps is bad; 0: never"""
    spike_after: int = number(100, 0, 10**6, when=conditions.SPIKES)
    """good steps before spikes are looked for"""
    aux_loss: float = number(0.0, 0, 1000, when=conditions.EXPERTS)
    """coefficient of the router's load-balancing loss"""
    z_loss: float = number(0.0, 0, 1000, when=conditions.EXPERTS)
    """coefficient of the router's z-loss"""
    mtp_loss: float = number(0.1, 0, 1000, when=(conditions.MTP, conditions.NLL, conditions.NO_TEACHER), off=0)
    """weight of multi-token prediction, where the model has it; 0 leaves it out, as losses of preferences and a teacher do"""
    speech_loss: float = number(0.0, 0, 1000, when=(conditions.TALKER, conditions.NLL, conditions.NO_TEACHER))
    """weight of the talker's loss, beside that of the text where the thinker is trained, too; every row has `speech` then; 0: there is no talker"""
    residual_loss: float = number(0.3, 0, 1000, when=(conditions.SPEECH, conditions.RESIDUAL))
    """weight of the residual codebooks' mean loss, next to the first codebook's"""
    eval_every: int = number(0, 0, 10**9, when=conditions.EVALUATION)
    """steps between evaluations; 0: only at the end"""
    eval_rows: int | None = number(None, 0, 10**9, when=conditions.HELD_OUT)
    """rows of the evaluation set that are used; 0: none; default: all"""
    save: Literal["full", "weights"] = setting("full", when=ALWAYS)
    """full | weights: a checkpoint without optimizer state is smaller, and a resumed run begins the optimizer's moments anew"""
    save_every: int = number(0, 0, 10**9, when=ALWAYS)
    """steps between checkpoints; 0: only at the end"""
    save_minutes: float | None = number(None, above=0, most=1e8, when=ALWAYS)
    """minutes between checkpoints, beside those of save_every"""
    keep: int = number(2, 1, 10**6, when=ALWAYS)
    """checkpoints kept, newest first"""
    keep_best: str | None = setting("loss", when=conditions.EVALUATION)
    """the checkpoint that is best at this metric of held-out rows is kept too: loss, exact_match, exact_match_image, or NAME:min, NAME:max; null: none"""
    early_stop: str | None = setting(None, when=conditions.EVALUATION)
    """metric of held-out rows, named as in keep_best: the run ends when it improves no more; default: not used"""
    early_stop_patience: int = number(3, 1, 10**6, when=conditions.EARLY_STOP)
    """evaluations in a row without an improvement that end the run"""
    early_stop_min_delta: float = number(0.0, 0, 1e9, when=conditions.EARLY_STOP)
    """an improvement is one of more than this"""
    log_every: int = number(10, 1, 10**9, when=ALWAYS)
    """steps between plain log lines (every step is in train.jsonl)"""
    max_minutes: float | None = number(None, above=0, most=1e8, when=ALWAYS)
    """stop (save, evaluate, export) after this long"""

    @property
    def pairs(self) -> bool:
        """Whether the loss is one of preference pairs."""
        return self.loss in ("dpo", "ipo", "simpo", "orpo", "reward")

    @property
    def scores(self) -> bool:
        """Whether the model is one that scores answers."""
        return self.loss == "reward"

    @property
    def embeds(self) -> bool:
        """Whether the model is one that gives vectors."""
        return self.loss == "embed"

    @property
    def headless(self) -> bool:
        """Whether the model has no head of the vocabulary, so that it says nothing."""
        return self.scores or self.embeds

    @property
    def labelled(self) -> bool:
        """Whether the loss is one of answers with a label."""
        return self.loss == "kto"

    @property
    def preference(self) -> bool:
        """Whether the loss takes pairs of answers, or answers with a label."""
        return self.pairs or self.labelled


# fmt: on
