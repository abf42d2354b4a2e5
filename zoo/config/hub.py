"""Whether the Hugging Face hub can be reached, asked once: its library would ask again and again, with waits between."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from zoo.errors import UserError

_SECONDS = 10.0  # for a connection


@contextmanager
def asking_the_hub() -> Iterator[str | None]:
    """Why the hub can't be reached, or None where it can.

    In the block what is cached serves, and nothing is asked of a hub that can't be reached. A proxy is taken to work.
    """
    from huggingface_hub import constants

    modules: list[Any] = [constants, *filter(None, [sys.modules.get("datasets.config")])]
    before = [module.HF_HUB_OFFLINE for module in modules]
    if any(before):
        yield "HF_HUB_OFFLINE is set"
        return
    why = _unreachable(constants.ENDPOINT)
    if why is None:
        yield None
        return
    for module in modules:
        module.HF_HUB_OFFLINE = True
    try:
        yield why
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value


def _unreachable(endpoint: str) -> str | None:
    """Why no connection to that address comes about, or None."""
    address = urlsplit(endpoint)
    host = address.hostname or ""
    if address.scheme in getproxies() and not proxy_bypass(host):
        return None
    try:
        socket.create_connection((host, address.port or (80 if address.scheme == "http" else 443)), _SECONDS).close()
    except (OSError, UnicodeError) as error:
        return f"no connection to {host}: {getattr(error, 'strerror', None) or error}"
    return None


def check_on_hub(name: str, kind: str, named: str) -> None:
    """UserError where the hub has no model or data set of that id, or can't be reached and no copy of it is in the cache.

    Args:
        kind: model or dataset.
        named: what the user wrote, for messages.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    noun = "data set" if kind == "dataset" else kind
    with asking_the_hub() as unreachable:
        if _is_cached(name, kind):
            return
        if unreachable is not None:
            raise UserError(
                f"{named}: the hub is out of reach ({unreachable}), and no copy of the {noun} is in the cache; give files, or a connection"
            )
        try:
            HfApi().repo_info(name, repo_type=kind, timeout=_SECONDS)
        except RepositoryNotFoundError:
            raise UserError(
                f"{named}: no {noun} that the hub gives out; check the name, and the token of a private one"
            ) from None
        except Exception:  # of many kinds, also of the network: whoever loads it says more
            return


def _is_cached(name: str, kind: str) -> bool:
    """Whether something of it is in the caches of huggingface_hub or datasets."""
    from huggingface_hub import constants

    folders = [Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}"]
    if kind == "dataset":
        datasets = sys.modules.get("datasets.config")
        home = getattr(datasets, "HF_DATASETS_CACHE", None) or os.environ.get("HF_DATASETS_CACHE")
        folders.append(Path(home or Path(constants.HF_HOME) / "datasets") / name.replace("/", "___"))
        folders.append(folders[-1].with_name(folders[-1].name.lower()))
    return any(folder.exists() for folder in folders)
