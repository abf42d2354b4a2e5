"""When keys of a recipe have an effect: the conditions that the schema states beside its keys.

A condition holds where a recipe does not tell yet: an architecture that is not known here, parallel sizes that will be planned.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from zoo.config.architecture import num_experts, text_config
from zoo.config.entries import AUTO, DataEntry, held_out_entries, only_bundled, parse_entry
from zoo.config.layers.keys import When
from zoo.registry import families

type Recipe = Any
"""A zoo.Recipe, whose schema imports this module."""

REFERENCED = ("dpo", "ipo", "kto")  # losses that compare with a reference model


def _value(key: str, holds: Callable[[Any], bool], *, lacks: str, do: str) -> When:
    value = attrgetter(key)
    return When(lacks=lacks, do=do, keys=(key,), holds=lambda recipe: holds(value(recipe)))


def _one_of(key: str, *values: Any, lacks: str) -> When:
    do = f"set {key} to {' or '.join(filter(None, (', '.join(values[:-1]), values[-1])))}"
    return _value(key, lambda value: value in values, lacks=lacks, do=do)


def _above_zero(key: str, lacks: str) -> When:
    return _value(key, lambda value: value > 0, lacks=lacks, do=f"set {key} above 0")


def _stated(key: str, lacks: str, do: str) -> When:
    return _value(key, lambda value: value is not None, lacks=lacks, do=do)


def _left_out(key: str, lacks: str) -> When:
    return _value(key, lambda value: value is None, lacks=lacks, do=f"leave {key} out")


def _size(name: str, lacks: str) -> When:
    return When(
        lacks=lacks,
        do=f"set parallel.{name}=2 or more",
        keys=(f"parallel.{name}",),
        holds=lambda recipe: getattr(recipe.parallel, name) > 1 or name in recipe.parallel.plan,
    )


def _takes_media(kind: str, of_which: str) -> When:
    return When(
        lacks=f"in a family that takes no {of_which}",
        do=f"train a family that takes {of_which}",
        keys=("model.family",),
        holds=lambda recipe: kind in _modalities(recipe),
    )


def _modalities(recipe: Recipe) -> tuple[str, ...]:
    family = families().get(recipe.model.family)
    return ("text", "image", "video", "audio") if family is None else family.modalities


def _has_experts(recipe: Recipe) -> bool:
    return not recipe.model.arch or num_experts(recipe.model.arch) > 0


def _exchanges_tokens(recipe: Recipe) -> bool:
    parallel = recipe.parallel
    return _has_experts(recipe) and (parallel.ep * parallel.etp > 1 or "ep" in parallel.plan)


def _has_mtp(recipe: Recipe) -> bool:
    family = families().get(recipe.model.family)
    return family is None or not recipe.model.arch or bool(text_config(recipe.model.arch).get(*family.mtp))


def _has_talker(recipe: Recipe) -> bool:
    arch, family = recipe.model.arch, families().get(recipe.model.family)
    speaks = not arch or bool(arch.get("enable_audio_output") and arch.get("talker_config"))
    return family is None or ("talker" in family.parts and speaks)


def _has_residual_codes(recipe: Recipe) -> bool:
    talker = recipe.model.arch.get("talker_config")
    return not talker or "code_predictor_config" in talker


def _has_linear_attention(recipe: Recipe) -> bool:
    text = text_config(recipe.model.arch)
    heads = "linear_num_value_heads" in text  # configs of some models leave out layer_types
    return not recipe.model.arch or heads or "linear_attention" in (text.get("layer_types") or ())


def _train_entries(recipe: Recipe) -> list[DataEntry]:
    return [parse_entry(spec, "data.train") for spec in recipe.data.train]


def _has_held_out(recipe: Recipe) -> bool:
    return any(spec != AUTO or held_out_entries(_train_entries(recipe)) for spec in recipe.data.eval)


def _augments(recipe: Recipe) -> bool:
    data = recipe.data
    bundled = data.bundled.get("augment") if only_bundled(_train_entries(recipe)) else 0
    return bool(bundled if data.augment is None else data.augment)


ADAPTERS = _value("lora.rank", lambda value: value > 0, lacks="without adapters", do="set lora.rank")
WHOLE_WEIGHTS = _value(
    "lora.rank", lambda value: not value, lacks="of adapters, which are one file", do="leave lora.rank out"
)
EXPORT = _value("export", bool, lacks="without an export", do="set export=true")
HUB_REPO = _stated("hub.repo", lacks="without a repository to push to", do="set hub.repo=owner/name")
DENSE_ADAPTERS = When(
    lacks="on adapters of experts",
    do="name linears outside of experts in lora.targets",
    keys=("lora.targets",),
    holds=lambda recipe: not all(name.startswith("experts.") for name in recipe.lora.targets),
)
WEIGHTS = _value(
    "model.init", lambda value: value != "random", lacks="on random weights", do="name weights with model.init"
)
EXPERTS = When(lacks="in a model without experts", do="train a model that has experts", holds=_has_experts)
EXPERT_EXCHANGE = When(
    lacks="where no tokens go to experts of other ranks",
    do="set parallel.ep=2 or more for a model with experts",
    keys=("parallel.ep", "parallel.etp"),
    holds=_exchanges_tokens,
)
SHARED_MEDIA = When(
    lacks="where no rank waits for another one's towers",
    do="set parallel.pp=2 or more, or parallel.ep=2 or more for a model with experts",
    keys=("parallel.pp", "parallel.ep", "parallel.etp"),
    holds=lambda recipe: recipe.parallel.pp > 1 or "pp" in recipe.parallel.plan or _exchanges_tokens(recipe),
)
MTP = When(
    lacks="in a model without layers for multi-token prediction", do="train a model that has them", holds=_has_mtp
)
TALKER = When(
    lacks="in a model without a talker that can be trained", do="train a model that has one", holds=_has_talker
)
SPEECH = _above_zero("train.speech_loss", "without a loss of speech")
RESIDUAL = When(lacks="of a talker with one codebook", do="train a talker that has more", holds=_has_residual_codes)
LINEAR_ATTENTION = When(
    lacks="in a model without linear attention", do="train a model that has it", holds=_has_linear_attention
)

NLL = _one_of("train.loss", "nll", lacks="under a loss of preferences")
PREFERENCES = _one_of(
    "train.loss", "dpo", "ipo", "simpo", "orpo", "kto", lacks="under a loss that weighs no preferences"
)
REFERENCE = _one_of("train.loss", *REFERENCED, lacks="under a loss without a reference model")
SMOOTHED = _one_of("train.loss", "dpo", "simpo", lacks="under a loss without label smoothing")
SIMPO = _one_of("train.loss", "simpo", lacks="under another loss")
KTO = _one_of("train.loss", "kto", lacks="under another loss")
REWARD = _one_of("train.loss", "reward", lacks="under another loss")
PAIRS_OR_LABELS = _one_of(
    "train.loss", "dpo", "ipo", "simpo", "orpo", "kto", "reward", lacks="under a loss that settles dropout itself"
)
EMBED = _one_of("train.loss", "embed", lacks="without embeddings")
DROPOUT = _above_zero("lora.dropout", "without dropout")
TEACHER = _stated("distill.teacher", "without a teacher", "set distill.teacher")
NO_TEACHER = _left_out("distill.teacher", "beside a teacher")

RL = _stated("rl.algorithm", "without reinforcement learning", "take a recipe <family>_grpo")
IMPORTANCE = _one_of("rl.importance", "truncated", lacks="without importance weights")
VLLM = _one_of("rl.rollout", "vllm", lacks="without vLLM")
ZOO_ROLLOUT = _one_of("rl.rollout", "zoo", lacks="where vLLM generates")

MUON = _one_of("train.optimizer", "muon", lacks="under another optimizer")
FALLING_RATE = _one_of("train.schedule", "cosine", "linear", "wsd", lacks="under a constant rate")
WSD = _one_of("train.schedule", "wsd", lacks="under another schedule")
STOPS = _one_of("train.on_bad_step", "stop", lacks="where bad steps are skipped")
SKIPS = _one_of("train.on_bad_step", "skip", lacks="where bad steps stop the run")
SPIKES = _above_zero("train.spike", "where no spikes are looked for")

HELD_OUT = When(
    lacks="without rows to evaluate on",
    do="give data.eval=FILE, or held_out: 0.05 in an entry of data.train",
    keys=("data.eval",),
    holds=_has_held_out,
)
EVALUATION = When(
    lacks="without an evaluation",
    do="give data.eval=FILE, or held_out: 0.05 in an entry of data.train, and not train.eval_rows=0",
    keys=("data.eval", "train.eval_rows"),
    holds=lambda recipe: recipe.train.eval_rows != 0 and _has_held_out(recipe),
)
ANSWERS = _value(
    "train.loss",
    lambda value: value not in ("reward", "embed"),
    lacks="on a model that gives no answers",
    do="set another train.loss",
)
PREDICTIONS = _above_zero("log.predictions", "where no answers are shown")
EARLY_STOP = _stated("train.early_stop", "without early stopping", "set train.early_stop=loss, say")

PROFILE = _stated("run.profile", "without a profile", "set run.profile=20:22, say")

PACKED = _one_of("packing.mode", "thd", lacks="on rows that are not packed")
PADDED = _one_of("packing.mode", "none", lacks="on packed rows, which count as 1 and are as wide as packing.budget")
MEDIA = When(
    lacks="in a family that takes text alone",
    do="train a family that takes media",
    keys=("model.family",),
    holds=lambda recipe: _modalities(recipe) != ("text",),
)
IMAGES = _takes_media("image", "images")
VIDEOS = _takes_media("video", "videos")
WORKERS = _value(
    "data.workers",
    lambda value: value != 0,
    lacks="without processes that decode media",
    do="leave data.workers open, or set it above 0",
)
ENCODING = _value(
    "data.encode_in_workers",
    lambda value: value is not False,
    lacks="where workers make no samples",
    do="set data.encode_in_workers=true",
)
AUGMENTED = When(
    lacks="without random changes to media", do="set data.augment above 0", keys=("data.augment",), holds=_augments
)
ONLY_BUNDLED = When(
    lacks="where other rows than bundled ones are trained on",
    do="set data.augment, data.augment_variants or data.blank_answers themselves",
    keys=("data.train",),
    holds=lambda recipe: only_bundled(_train_entries(recipe)),
)

TENSOR_PARALLEL = _size("tp", "without tensor parallelism")
PIPELINE = _size("pp", "without pipeline stages")
CONTEXT_PARALLEL = _size("cp", "without context parallelism")
FP8 = _value("engine.fp8", bool, lacks="without FP8", do="set engine.fp8=true")
FULL_RECOMPUTE = When(
    lacks="without full recompute",
    do="set engine.recompute=full",
    keys=("engine.recompute",),
    holds=lambda recipe: recipe.engine.recompute == "full" or "recompute" in recipe.parallel.plan,
)
NO_GRAPHS = _value(
    "engine.cuda_graphs", lambda value: not value, lacks="under CUDA graphs", do="set engine.cuda_graphs=false"
)
OPEN_RANKS = _left_out("nproc", "where nproc says how many ranks are started")
