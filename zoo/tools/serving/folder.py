"""What a server is given: an exported folder, or a run's adapters with the weights that they belong to, and vLLM's command for it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zoo.bridge.mapping.served import RANKS, vllm_rank
from zoo.config.locate import is_hub_id, locate, look, quantisation, read_arch
from zoo.errors import UserError
from zoo.files import expanded, read_object
from zoo.model.meta_model import family_of
from zoo.types import JsonMapping, JsonObject

NAME = "served"  # what the model is called in requests
ADAPTER = "adapter_config.json"
_LENGTH = 8192  # tokens of a conversation that a server takes at least, where the model does


@dataclass(frozen=True)
class ServedFolder:
    """What a server is given.

    Attributes:
        weights: the folder of a whole model, or its hub id.
        adapter: PEFT's folder of adapters that belong to it, or None.
        arch: the config.json of the whole model; {} where that is not on this machine.
    """

    weights: str
    adapter: Path | None = None
    arch: JsonObject = field(default_factory=dict)

    @classmethod
    def from_path(cls, path: str) -> ServedFolder:
        """The folder that a path names, `export/` of a run's.

        Raises:
            UserError: a server can load nothing there.
        """
        folder = expanded(path)
        if (folder / ADAPTER).is_file():
            return cls._from_adapter(folder)
        source = locate(path) if is_hub_id(path) else look(path)
        if source is not None and source.kind == "hf":
            return cls(str(source.folder), None, read_arch(source.folder))
        export = folder / "export"
        if (export / ADAPTER).is_file() or (export / "config.json").is_file():
            return cls.from_path(str(export))
        raise UserError(
            f"{path}: no Hugging Face folder, which servers load; write one: zoo convert {path} OUT, then "
            f"zoo verify {path} OUT served=vllm"
        )

    @classmethod
    def _from_adapter(cls, folder: Path) -> ServedFolder:
        base = read_object(folder / ADAPTER).get("base_model_name_or_path")
        if not isinstance(base, str):
            raise UserError(
                f"{folder / ADAPTER}: no base_model_name_or_path; wanted PEFT's adapters, as a run exports them"
            )
        has_config = (expanded(base) / "config.json").is_file()
        return cls(base, folder, read_arch(expanded(base)) if has_config else {})

    @property
    def dtype(self) -> str:
        """The dtype of the stored weights, in which a server computes: float32, bfloat16, float16; auto where it is not known."""
        stated = (part.get(key) for part in _parts(self.arch) for key in ("dtype", "torch_dtype"))
        return next((dtype for dtype in stated if isinstance(dtype, str)), "auto")

    @property
    def is_quantised(self) -> bool:
        """Whether the weights are stored in less than 16 bits."""
        return bool(quantisation(self.arch))

    @property
    def max_length(self) -> float:
        """The most tokens that the model takes, as its config says."""
        limits = (part.get("max_position_embeddings") for part in _parts(self.arch))
        return min((limit for limit in limits if isinstance(limit, int)), default=math.inf)


def _parts(arch: JsonObject) -> Iterator[dict[str, Any]]:
    """A config and the configs within it, outer ones first."""
    yield arch
    for value in arch.values():
        if isinstance(value, dict):
            yield from _parts(value)


def vllm_command(
    program: str, folder: ServedFolder, port: int, longest: int, options: JsonMapping, arguments: Sequence[str]
) -> list[str]:
    """The command that serves a folder by vLLM.

    Args:
        program: its path.
        folder: what it serves.
        port: where.
        longest: tokens of the longest row.
        options: arguments of transformers' processor that the folder does not say (`Processor.options_of_servers`).
        arguments: of the user; they come last, and hold.
    """
    length = int(min(max(_LENGTH, longest + 1), folder.max_length))
    command = [program, "serve", folder.weights, "--host", "127.0.0.1", "--port", str(port), "--dtype", folder.dtype]
    command += ["--max-model-len", str(length), "--served-model-name", NAME if folder.adapter is None else "base"]
    if folder.adapter is not None:
        _refuse_stacks(folder.adapter, folder.arch)
        command += [
            "--enable-lora",
            "--max-lora-rank",
            str(_rank(folder.adapter)),
            "--lora-modules",
            f"{NAME}={folder.adapter}",
        ]
    if options:
        command += ["--mm-processor-kwargs", json.dumps(options)]
    return [*command, *arguments]


def _refuse_stacks(adapter: Path, arch: JsonObject) -> None:
    """UserError for adapters of experts in PEFT's format where vLLM's model takes another."""
    parameters = read_object(adapter / ADAPTER).get("target_parameters")
    stacks = [name for name in parameters if ".experts." in str(name)] if isinstance(parameters, list) else []
    modules = {str(name).rpartition(".")[0] for name in stacks}
    if not stacks or not arch or (len(stacks) == 2 * len(modules) and family_of(arch).load("bridge").stacked_adapters):
        return
    raise UserError(
        f"{adapter}: vLLM takes these experts in another format; write it: zoo convert RUN OUT adapter_format=vllm, then "
        "zoo verify RUN OUT served=vllm"
    )


def transformers_command(program: str, folder: ServedFolder, port: int, arguments: Sequence[str]) -> list[str]:
    """The command that serves a folder by transformers; UserError for adapters, which it refuses."""
    if folder.adapter is not None:
        raise UserError(f"{folder.adapter}: transformers serve takes no adapters; serve them merged: zoo convert")
    command = [program, "serve", folder.weights, "--host", "127.0.0.1", "--port", str(port), "--dtype", folder.dtype]
    return [*command, *arguments]


def _rank(adapter: Path) -> int:
    config = read_object(adapter / ADAPTER)
    rank = max([config.get("r", 8), *(config.get("rank_pattern") or {}).values()])
    fitting = vllm_rank(rank)
    if fitting is None:
        raise UserError(
            f"{adapter}: adapters of rank {rank}, and vLLM takes {RANKS[-1]} at most; serve them merged: zoo convert"
        )
    return fitting
