"""The recipe's schema: what each key means, its unit and its default.

These dataclasses are the documentation of every key a user may type (``zoo show --schema`` prints the
comment behind each field), and each states when it has an effect (`when`). They hold plain values only; composition is in :mod:`zoo.config.compose`,
checks that involve more than one key are in :mod:`zoo.config.validate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from dataclasses import replace as with_parts
from typing import Any, ClassVar

from zoo.config.entries import has_objects, split_objects
from zoo.config.facts import conditions as given
from zoo.config.layers.keys import ALWAYS, Bounds, choice, keys, number, setting
from zoo.config.layers.tree import changed_keys, replaced, values_of

# A key, its default with the bounds of a number, and its meaning stay on one line.
# fmt: off


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where a run lives and what makes it repeatable."""

    dir: str | None = setting(None, when=ALWAYS)  # run folder; default runs/<recipe>-<size>
    seed: int = number(1234, 0, 2**32 - 1, when=ALWAYS)  # seeds weights, data order and dropout
    resume: bool = setting(True, when=ALWAYS)  # resume from the newest whole checkpoint of run.dir when there is one
    accept_changes: list[str] = setting(list, when=ALWAYS)  # keys or sections in which a resumed run may differ from its checkpoint: train.lr, data
    deterministic: bool = setting(False, when=ALWAYS)  # the same bits from the same seed on a GPU too, by slower kernels
    hang_timeout: float = number(10.0, 0, 1e6, when=ALWAYS)  # minutes without progress on any rank after which the run ends; 0: not watched
    callbacks: list[str] = setting(list, when=ALWAYS)  # module:Class, file.py:Class or names that packages announce, called at steps, evaluations and saves (docs/callbacks.md)
    stage: str | None = setting(None, when=ALWAYS)  # folder on a local disk that checkpoints are written to first, and copied on from to run.dir beside training; null: straight to run.dir
    save_within: float = number(110.0, above=0, most=1e6, when=ALWAYS)  # seconds after SIGTERM, SIGUSR1, SIGHUP or SIGQUIT that a run has to save; after them it ends unsaved


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, and where its weights come from."""

    family: str = setting("", when=ALWAYS)  # a name that `zoo list` shows; a recipe sets it
    init: str = setting("random", when=ALWAYS)  # random | a Hugging Face folder | a hub id
    arch: dict[str, Any] = setting(dict, when=ALWAYS)  # Hugging Face config of the architecture (from size=)
    resize_embeddings: bool = setting(False, when=given.WEIGHTS)  # where the tokenizer of model.init has ids beyond the embedding: add rows to embedding and head, each the mean of those there
    freeze: list[str] = setting(list, when=ALWAYS)  # parts of the family that are not trained, such as vision, or merger alone


@dataclass(frozen=True, kw_only=True)
class MachineConfig:
    """What a run is planned for; `hardware=` fills it in."""

    gpu: str | None = setting(None, when=ALWAYS)  # kind of GPU, a name that `zoo list` shows; null: not known
    gpus: int | None = number(None, 1, 4096, when=ALWAYS)  # GPUs of a node; null: a machine without
    memory_gb: float | None = number(None, above=0, most=1e6, when=ALWAYS)  # memory of a GPU, in units of 10^9 bytes
    nodes: int = number(1, 1, 10**5, when=ALWAYS)  # nodes of the run
    host_memory_gb: float | None = number(None, above=0, most=1e7, when=ALWAYS)  # memory of a node's host, in units of 10^9 bytes; null: not known, except on the machine that trains


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the process groups; data parallel is what is left of the world size."""

    tp: int = number(1, 1, 10**5, when=ALWAYS)  # tensor parallel ranks
    pp: int = number(1, 1, 10**5, when=ALWAYS)  # pipeline stages
    vpp: int = number(1, 1, 10**5, when=given.PIPELINE, off=1)  # model chunks per pipeline stage (interleaved schedule when > 1)
    cp: int = number(1, 1, 10**5, when=ALWAYS)  # context parallel ranks
    cp_split: str = choice("auto", "auto", "zigzag", when=given.CONTEXT_PARALLEL, off="auto")  # what context-parallel ranks hold. auto: whole samples, in rows where each rank then has as much work, else chunks of each | zigzag: chunks of each
    ep: int = number(1, 1, 10**5, when=given.EXPERTS, off=1)  # expert parallel ranks
    etp: int = number(1, 1, 10**5, when=given.EXPERTS, off=1)  # tensor parallel ranks inside an expert
    stage_layers: list[int] = setting(list, when=given.PIPELINE, bounds=Bounds(least=1, most=1e5))  # decoder layers of each pipeline stage, pp * vpp numbers in the model's order; default: even, one fewer at the ends
    dispatch: str = choice("alltoall", "alltoall", "deepep", "hybridep", when=given.EXPERT_EXCHANGE, off="alltoall")  # how tokens come to the ranks of their experts. alltoall: zoo's exchange | deepep, hybridep: megatron-core's flex dispatcher with the package deep_ep
    overlap_param_gather: bool = setting(True, when=given.NO_GRAPHS, off=False)  # on GPUs, without engine.cuda_graphs: the next forward pass begins while updated weights are gathered from the data-parallel ranks
    sp: bool | None = setting(None, when=given.TENSOR_PARALLEL)  # sequence parallel; default: on when tp > 1 and the model has experts
    plan: list[str] = setting(list, when=ALWAYS)  # keys chosen so that the model fits: tp, pp, cp, ep, recompute, memory (AdamW's moments), offload (their share on the host), graphs (engine.cuda_graphs), batch
    planned: list[str] = setting(list, when=ALWAYS)  # keys that planning has chosen; a run writes it


@dataclass(frozen=True, kw_only=True)
class PackingConfig:
    """How samples are put into rows."""

    mode: str = choice("thd", "thd", "none", when=ALWAYS)  # thd: samples packed end to end | none: one padded row a sample
    budget: int = number(4096, 1, 10**8, when=ALWAYS)  # most tokens of a packed row, and of one sample
    pad_to: int | None = number(None, 1, 10**8, when=ALWAYS)  # fixed row length in tokens, for static shapes; default: the length of the row
    align: int | None = number(None, 1, 10**6, when=ALWAYS)  # multiple each sample is padded to; default: what cp, tp and fp8 need


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Rows, media and what happens to a bad row."""

    train: list[Any] = setting(lambda: ["digits:train"], when=ALWAYS)  # files, sets, mappings (docs/data.md)
    eval: list[Any] = setting(lambda: ["auto"], when=ALWAYS)  # the same for evaluation | none | auto: the rows that entries of data.train hold out; digits:heldout where digits alone are trained on
    root: str | None = setting(None, when=given.MEDIA)  # folder that media lie in; default: the folder of the file that names them
    outside_root: bool = setting(False, when=given.MEDIA)  # whether rows may name media outside of that folder
    urls: bool = setting(False, when=given.MEDIA)  # whether media at http(s) URLs are downloaded
    labels: str = choice("assistant", "assistant", "last", "all", when=ALWAYS)  # assistant (all answers) | last (the last one) | all (every token of text)
    template: dict[str, Any] = setting(dict, when=ALWAYS)  # arguments of the chat template: {reasoning_effort: low, preserve_thinking: false}
    literal_tags: bool = setting(False, when=given.MEDIA)  # whether <image>, <video> and <audio> in texts are text, beyond as many as the row has media; a family of text alone takes them so anyway
    special_tokens: list[str] = setting(list, when=ALWAYS)  # special tokens of the tokenizer that rows' texts may hold, such as <|box_start|>
    on_error: str = choice("raise", "raise", "skip", when=ALWAYS)  # raise | skip (counted and listed in bad_rows.jsonl)
    overlong: str = choice("error", "error", "drop", "truncate_text", "shrink", when=ALWAYS)  # error | drop | truncate_text | shrink (images and videos are made smaller), for a sample over packing.budget
    shuffle: bool = setting(True, when=ALWAYS)  # a new order every epoch, from run.seed
    lookahead: int = number(256, 1, 10**6, when=given.PACKED)  # samples the packer may choose from
    augment: float | None = number(None, 0, 1, when=given.MEDIA)  # strength, 0 to 1, of random changes to training media; default: 0
    augment_variants: int | None = number(None, 1, 10**6, when=(given.MEDIA, given.AUGMENTED))  # different changes of a row, each kept in the cache and used again; default: 8
    blank_answers: float | None = number(None, 0, 1, when=ALWAYS)  # share of answer tokens that are blanked in the model's input; default: 0
    bundled: dict[str, float] = setting(dict, when=given.ONLY_BUNDLED, bounds=Bounds(least=0, most=1e6))  # defaults of augment, augment_variants and blank_answers where only bundled sets are trained on; tiny sizes set it
    cache_mb: int = number(512, 0, 10**8, when=ALWAYS)  # memory for processed samples, per rank, in MiB
    video_fps: float = number(2.0, above=0, most=1000, when=given.VIDEOS)  # frames taken per second of video
    max_frames: int = number(768, 1, 10**6, when=given.VIDEOS)  # most frames taken of one video
    min_pixels: int | None = number(None, 1, 10**9, when=given.IMAGES)  # an image of fewer pixels is enlarged; default: the processor's own
    max_pixels: int | None = number(None, 1, 10**9, when=given.IMAGES)  # an image of more pixels is made smaller; default: the processor's own
    video_max_pixels: int | None = number(None, 1, 10**10, when=given.VIDEOS)  # the same of a video, as the family's processor counts: of a frame, or of all frames together
    workers: int | None = number(None, 0, 1024, when=given.MEDIA)  # processes that decode media, a rank; 0: none; default: by the cores
    encode_in_workers: bool | None = setting(None, when=(given.MEDIA, given.WORKERS))  # whether as many processes make whole samples of rows with media; default: where there is a GPU
    ahead_mb: int = number(4096, 1, 10**8, when=(given.MEDIA, given.WORKERS, given.ENCODING))  # most MiB of samples, a rank, that such processes make ahead of the step that needs them
    row_seconds: float = number(60.0, above=0, most=1e6, when=(given.MEDIA, given.WORKERS))  # longest time that decoding the media of a row may take in a worker
    row_mb: int = number(8192, 1, 10**8, when=given.MEDIA)  # most MiB that decoding a medium takes in a worker, or a row's media once decoded


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The optimisation."""

    steps: int | None = number(None, 1, 10**9, when=ALWAYS)  # optimizer steps; default: from epochs
    epochs: float | None = number(None, above=0, most=1e6, when=ALWAYS)  # passes over the training rows, when steps is not given
    global_batch: int = number(8, 1, 10**6, when=ALWAYS)  # rows per optimizer step, all ranks together (packed rows under thd)
    micro_batch: int = number(1, 1, 10**5, when=given.PADDED, off=1)  # rows per forward pass and rank (packing.mode=none; a packed row counts as 1)
    loss: str = choice("nll", "nll", "dpo", "ipo", "simpo", "orpo", "kto", "reward", when=ALWAYS)  # nll: of the answers' tokens | of preference pairs, kto: of labelled answers | reward: of pairs, for a model that scores answers (docs/preference.md)
    beta: float = number(0.1, above=0, most=1e6, when=given.PREFERENCES)  # how much a difference of log-probabilities counts for a loss of preferences
    reference: str = setting("start", when=given.REFERENCE)  # dpo, ipo, kto: start (the run's first weights) | base (the weights without adapters) | another model, as model.init names it | a reference.safetensors
    label_smoothing: float = number(0.0, 0, below=0.5, when=given.SMOOTHED)  # dpo, simpo: share of pairs taken to be the wrong way round
    simpo_gamma: float = number(0.5, 0, 1e6, when=given.SIMPO)  # simpo: the margin between the rewards of a pair
    desirable_weight: float = number(1.0, 0, 1e6, when=given.KTO)  # kto: of desirable answers in the loss
    undesirable_weight: float = number(1.0, 0, 1e6, when=given.KTO)  # kto: of the others
    center_rewards: float = number(0.0, 0, 1e6, when=given.REWARD)  # reward: weight of the squared sum of a pair's scores, which keeps their mean at 0
    lr: float = number(1e-5, 0, 100, when=ALWAYS)  # peak learning rate
    min_lr: float = number(0.0, 0, 100, when=given.FALLING_RATE)  # learning rate that the schedule would reach one update after the last; constant has none
    lr_scale: dict[str, float] = setting(dict, when=ALWAYS, bounds=Bounds(least=0, most=1e6))  # factor of lr for a part of the model
    warmup_steps: int = number(0, 0, 10**9, when=ALWAYS)  # linear warm-up in updates, the last one at lr; a run of fewer updates never reaches lr
    schedule: str = choice("cosine", "cosine", "constant", "linear", "wsd", when=ALWAYS)  # after the warm-up: cosine or linear to min_lr | constant: lr | wsd: lr, then linear to min_lr over decay_steps
    decay_steps: int | None = number(None, 1, 10**9, when=given.WSD)  # wsd: the last updates, in which the rate falls; default: a tenth of the steps
    optimizer: str = choice("adamw", "adamw", "muon", when=ALWAYS)  # adamw | muon: Muon for the matrices of decoder and towers, AdamW for embeddings, heads, routers, norms and biases
    momentum: float = number(0.95, 0, below=1, when=given.MUON)  # Muon
    matrix_lr_scale: float = number(1.0, above=0, most=1e3, when=given.MUON)  # learning rate of Muon's matrices, as a factor of lr
    weight_decay: float = number(0.0, 0, 100, when=ALWAYS)  # decoupled weight decay (not on norms and biases)
    beta1: float = number(0.9, 0, below=1, when=ALWAYS)  # AdamW
    beta2: float = number(0.95, 0, below=1, when=ALWAYS)  # AdamW
    eps: float = number(1e-8, above=0, most=1, when=ALWAYS)  # AdamW
    exp_avg_dtype: str = choice("fp32", "fp32", "bf16", "fp8", when=ALWAYS)  # how AdamW's first moment and Muon's momentum are held: fp32 | bf16 | fp8 (8 bits, 128 values share an exponent)
    exp_avg_sq_dtype: str = choice("fp32", "fp32", "bf16", "fp8", when=ALWAYS)  # the same of AdamW's second moment
    optimizer_offload_fraction: float = number(0.0, 0, 1, when=ALWAYS)  # share of AdamW's state that is in the host's memory, and updated there by the rank's cores
    main_grads_dtype: str = choice("fp32", "fp32", "bf16", when=ALWAYS)  # fp32 | bf16: how gradients are kept, and summed over micro-batches; ranks' are summed in fp32 either way; bf16 needs engine.precision=bf16
    clip_grad: float = number(1.0, 0, 1e9, when=ALWAYS)  # largest global gradient norm; 0 turns clipping off
    on_bad_step: str = choice("stop", "stop", "skip", when=ALWAYS)  # a bad step is never applied; stop (after bad_steps) | skip (up to skip_limit)
    bad_steps: int = number(3, 1, 10**6, when=given.STOPS)  # bad steps in a row at which on_bad_step=stop ends the run
    skip_limit: int = number(20, 1, 10**6, when=ALWAYS)  # bad steps among the last 4 * skip_limit steps that end the run, or that are a new level of the loss
    on_new_level: str = choice("stop", "stop", "take", when=(given.SKIPS, given.SPIKES), off="stop")  # stop | take: after skip_limit spikes in a row, their level is the normal one; losses that are not finite still stop
    spike: float = number(10.0, 0, 1e9, when=ALWAYS)  # a loss this many spreads above the median of good steps is bad; 0: never
    spike_after: int = number(100, 0, 10**6, when=given.SPIKES)  # good steps before spikes are looked for
    aux_loss: float = number(0.0, 0, 1000, when=given.EXPERTS)  # coefficient of the router's load-balancing loss
    z_loss: float = number(0.0, 0, 1000, when=given.EXPERTS)  # coefficient of the router's z-loss
    mtp_loss: float = number(0.1, 0, 1000, when=(given.MTP, given.NLL, given.NO_TEACHER), off=0)  # weight of multi-token prediction, where the model has it; 0 leaves it out, as losses of preferences and a teacher do
    eval_every: int = number(0, 0, 10**9, when=given.EVALUATION)  # steps between evaluations; 0: only at the end
    eval_rows: int | None = number(None, 0, 10**9, when=given.HELD_OUT)  # rows of the evaluation set that are used; 0: none; default: all
    save: str = choice("full", "full", "weights", when=ALWAYS)  # full | weights: a checkpoint without optimizer state is smaller, and a resumed run begins the optimizer's moments anew
    save_every: int = number(0, 0, 10**9, when=ALWAYS)  # steps between checkpoints; 0: only at the end
    save_minutes: float | None = number(None, above=0, most=1e8, when=ALWAYS)  # minutes between checkpoints, beside those of save_every
    keep: int = number(2, 1, 10**6, when=ALWAYS)  # checkpoints kept, newest first
    keep_best: str | None = setting("loss", when=given.EVALUATION)  # the checkpoint that is best at this metric of held-out rows is kept too: loss, exact_match, exact_match_image, or NAME:min, NAME:max; null: none
    early_stop: str | None = setting(None, when=given.EVALUATION)  # metric of held-out rows, named as in keep_best: the run ends when it improves no more; default: not used
    early_stop_patience: int = number(3, 1, 10**6, when=given.EARLY_STOP)  # evaluations in a row without an improvement that end the run
    early_stop_min_delta: float = number(0.0, 0, 1e9, when=given.EARLY_STOP)  # an improvement is one of more than this
    log_every: int = number(10, 1, 10**9, when=ALWAYS)  # steps between plain log lines (every step is in train.jsonl)
    max_minutes: float | None = number(None, above=0, most=1e8, when=ALWAYS)  # stop (save, evaluate, export) after this long

    @property
    def pairs(self) -> bool:
        """Whether the loss is one of preference pairs."""
        return self.loss in ("dpo", "ipo", "simpo", "orpo", "reward")

    @property
    def scores(self) -> bool:
        """Whether the model is one that scores answers."""
        return self.loss == "reward"

    @property
    def labelled(self) -> bool:
        """Whether the loss is one of answers with a label."""
        return self.loss == "kto"

    @property
    def preference(self) -> bool:
        """Whether the loss is one of either."""
        return self.pairs or self.labelled


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """Learning from a teacher's distributions beside the labels (docs/distillation.md)."""

    teacher: str | None = setting(None, when=ALWAYS)  # a model of the same family and tokens, as model.init names it, which is in memory beside the student, or a folder of its tokens (zoo score ... top_k=); null: none
    top_k: int = number(64, 1, 10**5, when=given.TEACHER)  # of the teacher's most likely tokens that are told apart; the others are one outcome
    temperature: float = number(1.0, above=0, most=1e3, when=given.TEACHER)  # at which both distributions are compared
    weight: float = number(0.5, 0, 1, when=given.TEACHER)  # of the divergence in the loss; the cross entropy of the labels has the rest


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters: they alone are trained, and are exported in PEFT's format."""

    rank: int = number(0, 0, 10**5, when=ALWAYS)  # width of the adapters; 0: none, the model's own weights are trained
    alpha: float = number(32.0, above=0, most=1e6, when=given.ADAPTERS)  # an adapter's output is multiplied by alpha / rank
    dropout: float = number(0.0, 0, below=1, when=(given.ADAPTERS, given.DENSE_ADAPTERS))  # dropout of an adapter's input; experts have none, and losses of preferences leave it out
    keep_dropout: bool = setting(False, when=(given.ADAPTERS, given.PAIRS_OR_LABELS, given.DROPOUT))  # losses of preferences keep dropout in the policy's pass, which the reference has none in
    targets: list[str] = setting(lambda: ["all-linear"], when=given.ADAPTERS)  # names or regular expressions of linears; all-linear: all but experts (experts.gate_up_proj, ...)
    parts: list[str] = setting(lambda: ["language"], when=given.ADAPTERS)  # parts of the model that targets are in
    base_dtype: str = choice("model", "model", "fp8", when=given.ADAPTERS, off="model")  # how the decoder's frozen matrices are held: model (as engine.precision says) | fp8 (8 bits, 128 values of a row share a scale); made dense for each product
    init: str | None = setting(None, when=given.ADAPTERS)  # adapter folder in PEFT's format to start from; default: new adapters


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the model is executed."""

    backend: str = choice("auto", "auto", "te", "torch", when=ALWAYS)  # auto | te | torch; auto is te for FP8 by tensor, and else torch
    precision: str | None = choice(None, "fp32", "bf16", when=ALWAYS)  # fp32 | bf16; default: bf16 on a GPU, fp32 on the CPU
    fp8: bool = setting(False, when=ALWAYS)  # linears of attention and dense MLPs in FP8; needs bf16
    fp8_recipe: str = choice("blockwise", "blockwise", "tensorwise", when=given.FP8)  # blockwise: a scale for 128 values, weight gradients in bf16; on Hopper, without te | tensorwise: a scale for a tensor; needs te
    recompute: str = choice("none", "none", "selective", "full", when=ALWAYS)  # none | selective (MLP, experts) | full: computed again in backward
    cuda_graphs: bool = setting(False, when=ALWAYS)  # on a GPU, layers of dense decoders and vision towers are captured once for each size of row, and replayed: for rows so small that the host launches longer than the GPU computes
    threads: int | None = number(None, 1, 1024, when=ALWAYS)  # CPU threads a rank; default: 1 beside a GPU, else cores / ranks
    delta_rule: str = choice("auto", "auto", "flash_qla", "torch", when=given.LINEAR_ATTENTION, off="auto")  # auto: flash-linear-attention | flash_qla: faster, a minute and a half to compile once; needs flash-qla | torch: plain and slow, where the fast kernel is refused on this GPU
    doctor: bool = setting(True, when=ALWAYS)  # on a GPU, kernels are checked before training, once for this machine and shapes


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Where metrics go, besides train.jsonl."""

    tensorboard: bool = setting(True, when=ALWAYS)  # event files in run.dir/tensorboard
    wandb: str | None = setting(None, when=ALWAYS)  # project name at Weights & Biases; default: not used
    mlflow: str | None = setting(None, when=ALWAYS)  # experiment name at MLflow, which MLFLOW_TRACKING_URI places; default: not used
    trackio: str | None = setting(None, when=ALWAYS)  # project name at Trackio; default: not used
    predictions: int = number(8, 0, 64, when=(given.EVALUATION, given.ANSWERS), off=0)  # held-out rows whose greedy answers are shown at each evaluation, in predictions.jsonl and plots/predictions.png; 0: none
    prediction_tokens: int = number(64, 1, 10**5, when=(given.EVALUATION, given.ANSWERS, given.PREDICTIONS))  # most tokens of such an answer
    slow_step: float = number(3.0, 0, 1e6, when=ALWAYS)  # a step slower than so many times the running median is reported, with its cause; 0: never


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole run. `zoo train` resolves one from defaults, recipe, size, hardware and overrides."""

    recipe: str = setting("custom", when=ALWAYS)  # name or path of the recipe file it came from
    size: str | None = setting(None, when=ALWAYS)  # a size that `zoo list` shows; default: published size on a GPU, tiny without
    hardware: str | None = setting(None, when=ALWAYS)  # 8xh200, 2x8xh100, 4xa100-40, 8x80gb, cpu, auto, a path; default: auto on a GPU
    nproc: int | None = number(None, 1, 4096, when=ALWAYS)  # ranks started on this machine; default: one a GPU, or nproc_cpu without
    nproc_cpu: int = number(1, 1, 4096, when=given.OPEN_RANKS)  # ranks started where there is no GPU, at most one a core
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    packing: PackingConfig = field(default_factory=PackingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    log: LogConfig = field(default_factory=LogConfig)
    export: bool = setting(True, when=ALWAYS)  # write a Hugging Face folder (with lora, an adapter) to run.dir/export at the end

    _set_by_user: ClassVar[frozenset[str] | None] = None  # None: not known

    @property
    def set_by_user(self) -> frozenset[str]:
        """The keys that overrides, the user's file and `replace` have set; of a recipe built by hand those that differ from their defaults."""
        if self._set_by_user is None and self.recipe == Recipe.recipe:
            return frozenset(key for key, value in values_of(self).items() if value != keys(Recipe)[key].default)
        return self._set_by_user or frozenset()

    def marked(self, set_by_user: frozenset[str] | None) -> Recipe:
        """This recipe, which then has these as `set_by_user`."""
        object.__setattr__(self, "_set_by_user", set_by_user)
        return self

    @property
    def named_parts(self) -> set[str]:
        """Parts of the model that some key names: an inner part (a tower's merger) among them is no part of its tower then."""
        return {*self.model.freeze, *self.train.lr_scale, *(self.lora.parts if self.lora.rank else ())}

    def replace(self, changes: Mapping[str, Any] | None = None, /, **more: Any) -> Recipe:
        """A copy with other values, checked like overrides.

        Args:
            changes: by dotted key, ``{"train.lr": 1e-4, "data.train[0].weight": 2}``, or nested.
            more: by name, a section's as a dict or as its dataclass: ``replace(train={"lr": 1e-4}, nproc=2)``.

        Rows as objects may stand in data.train and data.eval: `zoo.train` writes them to the run folder.

        Raises:
            ConfigError: a key that there is not, or a value that is none of its kind.
        """
        named_changes = {name.replace("__", "."): value for name, value in more.items()}  # data__train=rows
        plain, objects = split_objects({**(changes or {}), **named_changes})
        held: dict[str, Any] = {name: getattr(self.data, name) for name in ("train", "eval")}
        held = {name: entries for name, entries in held.items() if has_objects(entries)}
        section = plain.get("data", {})
        whole = not isinstance(section, Mapping)  # a DataConfig, which has all keys
        named = {name for name in held if f"data.{name}" in plain or whole or name in section}
        parts: dict[str, Any] = {name: one for name, one in held.items() if name not in named} | objects
        emptied: dict[str, Any] = {name: [] for name in held}
        base = with_parts(self, data=with_parts(self.data, **emptied))
        changed = replaced(base, plain)
        changed = with_parts(changed, data=with_parts(changed.data, **parts)) if parts else changed
        known = self._set_by_user
        return changed.marked(None if known is None else known | changed_keys(self, plain))


# fmt: on
