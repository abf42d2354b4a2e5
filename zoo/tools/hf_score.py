"""Log-probabilities of a Hugging Face folder by transformers: what zoo's own are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.config.compose import recipe_for_weights
from zoo.config.entries import MediaLimits
from zoo.config.layers.layer import Overrides
from zoo.config.locate import Place, quantisation, read_arch
from zoo.data.media.decoding_workers import decoder_for
from zoo.data.sources.formats.choose import Form
from zoo.data.sources.row_set import foreign_media
from zoo.data.sources.rows import read_rows
from zoo.model import build
from zoo.model.meta_model import family_of
from zoo.parallel.determinism import plain_fp32
from zoo.types import JsonMapping, JsonObject


def transformers_class(arch: JsonMapping) -> Any:
    """The model of transformers that has the logits of a config's model_type; what `architectures` says is not read.

    The thinker's class loads the thinker alone out of a whole model's folder. In FP8 the whole model's class is taken: the thinker's
    would leave every scale out, as transformers looks for them under the thinker's own names.
    """
    import transformers

    config = transformers.CONFIG_MAPPING[arch["model_type"]]
    if not quantisation(arch):
        config = getattr(config, "sub_configs", {}).get("thinker_config", config)
    name = config.__name__.removesuffix("Config")
    text = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM", None)
    return getattr(transformers, f"{name}ForConditionalGeneration", text)


@contextmanager
def _without_bars() -> Iterator[None]:
    """transformers draws no progress bars; as before at the end."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@plain_fp32()
@torch.no_grad()
def hf_logprobs(weights: Place, rows: str | Path, overrides: Overrides = ()) -> list[JsonObject]:
    """`zoo.score` by transformers: one row after the other, in fp32, on a GPU where there is one; `overrides` of data hold."""
    import transformers

    arch = read_arch(weights.files)
    recipe = recipe_for_weights(str(weights.folder), family_of(arch).name, overrides)
    processor = build.assemble(recipe).processor
    kind = transformers_class(arch)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # No pickle, no code of the folder's; grouped products refuse narrow experts.
    options = {"use_safetensors": True, "trust_remote_code": False, "experts_implementation": "eager"}
    options["dtype"] = torch.float32
    if quantisation(arch):  # such a folder holds the bytes of a bf16 model
        options["dtype"] = torch.bfloat16
        options["quantization_config"] = transformers.FineGrainedFP8Config(dequantize=True)
    with _without_bars():
        whole = kind.from_pretrained(weights.folder, **options)
    model = getattr(whole, "thinker", whole).eval().to(device, torch.float32)
    scored = []
    literal = recipe.data.literal_tags or set(processor.modalities) <= {"text"}
    for row in read_rows(str(rows), form=Form(literal_tags=literal)):
        if foreign_media(row, processor.modalities):
            continue
        limits = MediaLimits.from_data(recipe.data)
        sample, inputs = processor.encode_both(
            row, video_fps=limits.video_fps, max_frames=limits.max_frames, labels=recipe.data.labels,
            pixels=limits.pixels, decoder=decoder_for(recipe.data),
        )  # fmt: skip
        moved = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in inputs.items()}
        logits = model(**moved).logits[0, :-1].float()
        targets = sample.input_ids[1:].to(device)
        logprobs = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0].cpu()
        labels = sample.labels.clone()
        labels[0] = -100
        values = {"token_ids": sample.input_ids.tolist(), "labels": labels.tolist()}
        values["logprobs"] = [0.0, *logprobs.masked_fill(labels[1:] == -100, 0.0).tolist()]
        scored.append({"source": row.source, "skipped": processor.incomparable(sample), **values})
    return scored
