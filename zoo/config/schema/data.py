"""Keys of the model, its adapters and a teacher, of the rows, and of how they are packed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from zoo.config.layers.keys import ALWAYS, Bounds, number, section, setting
from zoo.config.schema import conditions

# A key and its default with the bounds of a number stay on one line.
# fmt: off


@section
@dataclass(frozen=True, kw_only=True, repr=False)
class ModelConfig:
    """Which model, and where its weights come from."""

    family: str = setting("", when=ALWAYS)
    """a name that `zoo list` shows; a recipe sets it"""
    init: str = setting("random", when=ALWAYS)
    """random | a Hugging Face folder | a hub id"""
    arch: dict[str, Any] = setting(dict, when=ALWAYS)
    """Hugging Face config of the architecture (from size=)"""
    resize_embeddings: bool = setting(False, when=conditions.WEIGHTS)
    """where the tokenizer of model.init has ids beyond the embedding: add rows to embedding and head, each the mean of those there"""
    freeze: list[str] = setting(list, when=ALWAYS)
    """parts of the family that are not trained, such as vision, or merger alone"""


@section
@dataclass(frozen=True, kw_only=True, repr=False)
class LoraConfig:
    """Low-rank adapters: they alone are trained, but for parts named in whole_parts, and are exported in PEFT's format."""

    rank: int = number(0, 0, 10**5, when=ALWAYS)
    """width of the adapters; 0: none, the model's own weights are trained"""
    alpha: float = number(32.0, above=0, most=1e6, when=conditions.ADAPTERS)
    """an adapter's output is multiplied by alpha / rank"""
    rslora: bool = setting(False, when=conditions.ADAPTERS)
    """rank-stabilised (rsLoRA, arXiv 2312.03732): by alpha / sqrt(rank)"""
    dora: bool = setting(False, when=(conditions.ADAPTERS, conditions.DENSE_ADAPTERS))
    """each row of weight plus adapter is multiplied by a trained magnitude over its norm (DoRA, arXiv 2402.09353); not on experts"""
    rank_pattern: dict[str, int] = setting(dict, when=conditions.ADAPTERS, bounds=Bounds(least=1, most=1e5))
    """ranks of linears by regular expressions of the ends of their names, as in PEFT: {o_proj: 8}; the first that matches counts"""
    alpha_pattern: dict[str, float] = setting(dict, when=conditions.ADAPTERS, bounds=Bounds(above=0, most=1e6))
    """the same for alpha"""
    b_lr_scale: float = number(1.0, above=0, most=1e6, when=conditions.ADAPTERS)
    """factor of the learning rate for B of adapters (LoRA+, arXiv 2402.12354)"""
    dropout: float = number(0.0, 0, below=1, when=(conditions.ADAPTERS, conditions.DENSE_ADAPTERS))
    """dropout of an adapter's input; experts have none, and losses of preferences leave it out"""
    keep_dropout: bool = setting(False, when=(conditions.ADAPTERS, conditions.PAIRS_OR_LABELS, conditions.DROPOUT))
    """losses of preferences keep dropout in the policy's pass, which the reference has none in"""
    targets: list[str] = setting(lambda: ["all-linear"], when=conditions.ADAPTERS)
    """names or regular expressions of linears; all-linear: all but experts (experts.gate_up_proj, ...)"""
    parts: list[str] = setting(lambda: ["language"], when=conditions.ADAPTERS)
    """parts of the model that targets are in"""
    whole_parts: list[str] = setting(list, when=conditions.ADAPTERS)
    """parts of the model that are trained whole beside the adapters (PEFT's modules_to_save), such as merger"""
    base_dtype: Literal["model", "fp8", "nf4"] = setting("model", when=conditions.ADAPTERS, off="model")
    """how the decoder's frozen matrices are held: model (as engine.precision says) | fp8 (8 bits, 128 values of a row share a scale) | nf4 (4 bits, as QLoRA); made dense for each product"""
    init: str | None = setting(None, when=conditions.ADAPTERS)
    """adapter folder in PEFT's format to start from; default: new adapters"""
    merge_first: str | None = setting(None, when=conditions.ADAPTERS)
    """adapter folder in PEFT's format that is merged into the weights first; new adapters are trained on top, of base/ in the run's folder"""


@section
@dataclass(frozen=True, kw_only=True, repr=False)
class DistillConfig:
    """Learning from a teacher's distributions beside the labels (docs/distillation.md)."""

    teacher: str | None = setting(None, when=ALWAYS)
    """a model of the same family and tokens, as model.init names it, which is in memory beside the student, or a folder of its tokens (zoo score ... top_k=); null: none"""
    top_k: int = number(64, 1, 10**5, when=conditions.TEACHER)
    """of the teacher's most likely tokens that are told apart; the others are one outcome"""
    temperature: float = number(1.0, above=0, most=1e3, when=conditions.TEACHER)
    """at which both distributions are compared"""
    weight: float = number(0.5, 0, 1, when=conditions.TEACHER)
    """of the divergence in the loss; the cross entropy of the labels has the rest"""


@section
@dataclass(frozen=True, kw_only=True, repr=False)
class EmbedConfig:
    """Vectors of queries and candidates (docs/retrieval.md)."""

    pooling: Literal["last", "mean"] = setting("last", when=conditions.EMBED)
    """a vector is the last token's state | the mean of all tokens' states"""
    temperature: float = number(0.05, above=0, most=1e3, when=conditions.EMBED)
    """cosines are divided by it in the loss"""
    dimensions: list[int] = setting(list, when=conditions.EMBED, bounds=Bounds(least=1, most=1e6))
    """Matryoshka: the loss is the mean over vectors that are cut to these sizes; default: the model's hidden size alone"""
    instruction: str | None = setting(None, when=conditions.EMBED)
    """what queries are for, where a row has no instruction of its own"""
    template: Literal["auto", "chat", "plain"] = setting("auto", when=conditions.EMBED)
    """chat: the chat template with the opening of an answer, instructions in the system turn | plain: the text alone, instructions before it | auto: plain for text models"""


@section
@dataclass(frozen=True, kw_only=True, repr=False)
class PackingConfig:
    """How samples are put into rows."""

    mode: Literal["thd", "none"] = setting("thd", when=ALWAYS)
    """thd: samples packed end to end | none: one padded row a sample"""
    budget: int = number(4096, 1, 10**8, when=ALWAYS)
    """most tokens of a packed row, and of one sample"""
    pad_to: int | None = number(None, 1, 10**8, when=ALWAYS)
    """fixed row length in tokens, for static shapes; default: the length of the row"""
    align: int | None = number(None, 1, 10**6, when=ALWAYS)
    """multiple each sample is padded to; default: what cp, tp and fp8 need"""


@section
@dataclass(frozen=True, kw_only=True, repr=False)
class DataConfig:
    """Rows, media and what happens to a bad row."""

    train: list[Any] = setting(lambda: ["digits:train"], when=ALWAYS)
    """files, sets, mappings (docs/data.md)"""
    eval: list[Any] = setting(lambda: ["auto"], when=ALWAYS)
    """the same for evaluation | none | auto: the rows that entries of data.train hold out; digits:heldout where digits alone are trained on"""
    root: str | None = setting(None, when=conditions.MEDIA)
    """folder that media lie in; default: the folder of the file that names them"""
    outside_root: bool = setting(False, when=conditions.MEDIA)
    """whether rows may name media outside of that folder"""
    urls: bool = setting(False, when=conditions.MEDIA)
    """whether media at http(s) URLs are downloaded"""
    labels: Literal["assistant", "last", "all"] = setting("assistant", when=ALWAYS)
    """assistant (all answers) | last (the last one) | all (every token of text)"""
    template: dict[str, Any] = setting(dict, when=ALWAYS)
    """arguments of the chat template: {reasoning_effort: low, preserve_thinking: false}"""
    literal_tags: bool = setting(False, when=conditions.MEDIA)
    """whether <image>, <video> and <audio> in texts are text, beyond as many as the row has media; a family of text alone takes them so anyway"""
    special_tokens: list[str] = setting(list, when=ALWAYS)
    """special tokens of the tokenizer that rows' texts may hold, such as <|box_start|>"""
    codec: str | None = setting(None, when=conditions.SPEECH)
    """module:function(waveform float32 mono, rate) -> codes (frames, codebooks) of a row's `speech` that is a sound file; default: codes alone"""
    on_error: Literal["raise", "skip"] = setting("raise", when=ALWAYS)
    """raise | skip (counted and listed in bad_rows.jsonl)"""
    overlong: Literal["error", "drop", "truncate_text", "shrink"] = setting("error", when=ALWAYS)
    """error | drop | truncate_text | shrink (images and videos are made smaller), for a sample over packing.budget"""
    shuffle: bool = setting(True, when=ALWAYS)
    """a new order every epoch, from run.seed"""
    lookahead: int = number(256, 1, 10**6, when=conditions.PACKED)
    """samples the packer may choose from"""
    augment: float | None = number(None, 0, 1, when=conditions.MEDIA)
    """strength, 0 to 1, of random changes to training media; default: 0"""
    augment_variants: int | None = number(None, 1, 10**6, when=(conditions.MEDIA, conditions.AUGMENTED))
    """different changes of a row, each kept in the cache and used again; default: 8"""
    blank_answers: float | None = number(None, 0, 1, when=ALWAYS)
    """share of answer tokens that are blanked in the model's input; default: 0"""
    bundled: dict[str, float] = setting(dict, when=conditions.ONLY_BUNDLED, bounds=Bounds(least=0, most=1e6))
    """defaults of augment, augment_variants and blank_answers where only bundled sets are trained on; tiny sizes set it"""
    cache_mb: int = number(512, 0, 10**8, when=ALWAYS)
    """memory for processed samples, per rank, in MiB"""
    video_fps: float = number(2.0, above=0, most=1000, when=conditions.VIDEOS)
    """frames taken per second of video"""
    max_frames: int = number(768, 1, 10**6, when=conditions.VIDEOS)
    """most frames taken of one video"""
    min_pixels: int | None = number(None, 1, 10**9, when=conditions.IMAGES)
    """an image of fewer pixels is enlarged; default: the processor's own"""
    max_pixels: int | None = number(None, 1, 10**9, when=conditions.IMAGES)
    """an image of more pixels is made smaller; default: the processor's own"""
    video_max_pixels: int | None = number(None, 1, 10**10, when=conditions.VIDEOS)
    """the same of a video, as the family's processor counts: of a frame, or of all frames together"""
    workers: int | None = number(None, 0, 1024, when=conditions.MEDIA)
    """processes that decode media, a rank; 0: none; default: by the cores"""
    encode_in_workers: bool | None = setting(None, when=(conditions.MEDIA, conditions.WORKERS))
    """whether as many processes make whole samples of rows with media; default: where there is a GPU"""
    ahead_mb: int = number(4096, 1, 10**8, when=(conditions.MEDIA, conditions.WORKERS, conditions.ENCODING))
    """most MiB of samples, a rank, that such processes make ahead of the step that needs them"""
    row_seconds: float = number(60.0, above=0, most=1e6, when=(conditions.MEDIA, conditions.WORKERS))
    """longest time that decoding the media of a row may take in a worker"""
    row_mb: int = number(8192, 1, 10**8, when=conditions.MEDIA)
    """most MiB that decoding a medium takes in a worker, or a row's media once decoded"""


# fmt: on
