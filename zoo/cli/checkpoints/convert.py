"""
usage: zoo convert SOURCE TARGET [key=value ...] [--quiet]

Converts a checkpoint; the direction follows from what SOURCE is. A Hugging Face folder or hub id becomes zoo's own
weights, which training starts from (model.init=TARGET); those, or the folder or checkpoint of a run, become a Hugging
Face folder that from_pretrained loads.

  dtype=bf16         of the weights: bf16, fp16 or fp32; default: as they are. fp8: a Hugging Face folder in FP8 by blocks,
                     of whatever SOURCE is, as the model's -FP8 folders are published
  max_shard_size=5GB  most bytes of a weights file
  allow=PATTERN,...  tensors that may be missing, unmapped or extra (allow='talker.*'); recorded in the output
  revision=NAME      branch, tag or commit of a hub id
  overwrite=true     replace a TARGET that is there, if zoo wrote it and nothing was put into it since
  push_to=ORG/NAME   upload the Hugging Face folder to that repository of the hub
  private=false      make that repository public, where it isn't there yet
  adapter_format=vllm  write a run's adapters alone: vllm, as vLLM loads them, or peft; default: merge them into the weights
"""

from __future__ import annotations

from collections.abc import Sequence

from zoo.cli.arguments import split_flags, split_values
from zoo.types import JsonObject

KEYS = ("dtype", "max_shard_size", "allow", "revision", "overwrite", "push_to", "private", "adapter_format")


def run(arguments: Sequence[str]) -> int:
    """Convert, and say where the result is."""
    flags, rest = split_flags(arguments, ("--quiet",))
    (source, target), values = split_values(rest, KEYS, "zoo convert SOURCE TARGET", ("SOURCE", "TARGET"))
    options: JsonObject = dict(values)

    from zoo.tools.convert import convert

    written = convert(source, target, quiet="--quiet" in flags, **options)
    print(f"converted {source} to {written}")
    return 0
