"""Whether the Hugging Face hub can be reached, asked once: its library would ask again and again, with waits between."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

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
        socket.create_connection(
            (host, address.port or (80 if address.scheme == "http" else 443)), _SECONDS
        ).close()
    except (OSError, UnicodeError) as error:
        return f"no connection to {host}: {getattr(error, 'strerror', None) or error}"
    return None
