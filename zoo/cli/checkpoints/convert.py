"""
usage: zoo convert SOURCE TARGET [key=value ...] [--quiet]

Converts a checkpoint; the direction follows from what SOURCE is. A Hugging Face folder or hub id becomes zoo's own
weights, which training starts from (model.init=TARGET); those, or the folder or checkpoint of a run, become a Hugging
Face folder that from_pretrained loads.

  dtype=bf16         of the weights: bf16, fp16 or fp32; default: as they are
  shard_size=5GB     most bytes of a weights file
  allow=PATTERN,...  tensors that may be missing, unmapped or extra (allow='talker.*'); recorded in the output
  revision=NAME      branch, tag or commit of a hub id
  overwrite=true     replace a TARGET that is there, if zoo wrote it and nothing was put into it since
  push_to=ORG/NAME   upload the Hugging Face folder to that repository of the hub
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from zoo.cli.arguments import split_flags, split_values
from zoo.errors import UserError

KEYS = ("dtype", "shard_size", "allow", "revision", "overwrite", "push_to")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def run(arguments: Sequence[str]) -> int:
    """Convert, and say where the result is."""
    flags, rest = split_flags(arguments, ("--quiet",))
    (source, target), given = split_values(rest, KEYS, "zoo convert SOURCE TARGET", ("SOURCE", "TARGET"))
    options: dict[str, Any] = {key: given[key] for key in ("revision", "push_to") if key in given}
    if "shard_size" in given:
        options["shard_bytes"] = shard_bytes(given["shard_size"])
    if "allow" in given:
        options["allow"] = given["allow"].split(",")
    if "overwrite" in given:
        options["overwrite"] = flag("overwrite", given["overwrite"])

    from zoo.engine.tools.convert import convert, dtype_named

    dtype = dtype_named(given["dtype"]) if "dtype" in given else None
    made = convert(source, target, dtype=dtype, quiet="--quiet" in flags, **options)
    print(f"converted {source} to {made}")
    return 0


def shard_bytes(text: str) -> int:
    """`5GB`, `200 MB` or a number of bytes."""
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,12})?)\s*([KMG]?B?)", text.strip().upper())
    count = (
        int(float(match[1]) * _UNITS[match[2] + "B" if match[2] in ("K", "M", "G") else match[2]])
        if match
        else 0
    )
    if count <= 0:
        raise UserError(f"shard_size={text}: wanted a size such as 5GB or 200MB")
    return count


def flag(key: str, text: str) -> bool:
    """`true` or `false`."""
    if text.lower() not in ("true", "false"):
        raise UserError(f"{key}={text}: wanted true or false")
    return text.lower() == "true"
