"""The architecture of weights on the Hugging Face hub, known before they are downloaded: by their config.json, or by a size that comes with zoo."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from zoo.config.files import read_size, size_names
from zoo.config.hub import asking_the_hub
from zoo.config.locate import read_arch
from zoo.registry import families
from zoo.types import JsonObject

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]*\w")  # in the first line of a size's file


class KnownArch(NamedTuple):
    """The config of weights, None where it is not known, and where it is from, in a few words."""

    arch: JsonObject | None
    source: str


def arch_of_hub(hub_id: str, key: str) -> KnownArch:
    """The config of a hub id: of its config.json, else of the size that was published under it.

    Args:
        key: what the user gave it as, for messages: "model.init".

    Raises:
        ConfigError: a config.json that can't be read.
    """
    from huggingface_hub import hf_hub_download

    with asking_the_hub() as unreachable:
        try:
            path: Path | None = Path(hf_hub_download(hub_id, "config.json"))
        except Exception as error:  # of many kinds, also of the network
            path, why = None, unreachable or type(error).__name__
    if path is not None:
        return KnownArch(read_arch(path.parent, f"{key}={hub_id}"), "its config.json on the hub")
    if (published := published_size(hub_id)) is not None:
        family, size = published
        arch = read_size(family, size).tree["model"]["arch"]
        return KnownArch(arch, f"the published size={size}, as its config.json is not to be had ({why})")
    return KnownArch(None, f"its config.json is not to be had ({why})")


def published_size(hub_id: str) -> tuple[str, str] | None:
    """Family and size that were published under that id; None where zoo has none."""
    for family in families():
        for size in size_names(family):
            file = files("zoo.recipes") / "sizes" / family / f"{size}.yaml"
            if hub_id in _HUB_ID.findall(file.read_text(encoding="utf-8").partition("\n")[0]):
                return family, size
    return None
