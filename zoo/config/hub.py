"""The Hugging Face hub: whether it can be reached, asked once, as its library would ask again and again; and what is pushed to it."""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from zoo.errors import UserError, printable
from zoo.files import read_object

_SECONDS = 10.0  # for a connection
_REPO = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}")


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
        late = sys.modules.get("datasets.config")  # it copies the setting as it is imported
        if late is not None and late not in modules and "HF_DATASETS_OFFLINE" not in os.environ:
            vars(late)["HF_HUB_OFFLINE"] = False


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


def check_repo_name(repo: str, key: str) -> None:
    """UserError where it is no name of a repository; `key` is what the user gave it as."""
    if not _REPO.fullmatch(repo) or "--" in repo or ".." in repo or repo.endswith((".git", "-", ".")):
        raise UserError(f"{key}={printable(repo, 200)}: wanted owner/name, of letters, digits, '-', '_' and '.'")


def check_push(repo: str, key: str, *, private: bool) -> None:
    """Make the model repository where it is not there, and check that it takes what will be pushed: before hours of work.

    UserError for a name that is none of `owner/name`, without a token or with one that may not write there, where the hub is out of
    reach, and for a `private` push to a repository that is public. `key` is what the user gave the name as.
    """
    from huggingface_hub import HfApi, get_token

    check_repo_name(repo, key)
    named = f"{key}={repo}"
    with asking_the_hub() as unreachable:
        if unreachable is not None:
            raise UserError(
                f"{named}: the hub is out of reach ({unreachable}); leave {key} out, and push the folder later with `hf upload`"
            )
        if get_token() is None:
            raise UserError(f"{named}: no token for the hub; run `hf auth login`, or set HF_TOKEN")
        api = HfApi()
        try:
            api.create_repo(repo, private=private, exist_ok=True)
            api.auth_check(repo, write=True)
            is_public = api.repo_info(repo).private is False
        except Exception as error:
            raise UserError(f"{named}: {_why(error)}") from error
    if private and is_public:
        raise UserError(
            f"{named}: this repository is public; make it private there, give another, or allow it with private=false"
        )


def push(folder: Path, repo: str, key: str, *, private: bool) -> str:
    """Upload a folder's files to a model repository in one commit; the commit's address.

    UserError says why the hub did not take them, and the command that tries again.
    """
    from huggingface_hub import HfApi

    if (folder / "adapter_config.json").is_file():
        base = read_object(folder / "adapter_config.json").get("base_model_name_or_path")
        if isinstance(base, str) and Path(base).is_absolute():
            text = f"{key}={repo}: the adapter belongs to {base}, a folder that is not pushed; whoever loads it needs that too"
            print(f"zoo: WARNING: {text}", file=sys.stderr, flush=True)
    try:
        api = HfApi()
        api.create_repo(repo, private=private, exist_ok=True)
        return str(
            api.upload_folder(
                repo_id=repo, folder_path=str(folder), commit_message="Upload what zoo has written"
            ).commit_url
        )
    except Exception as error:
        again = shlex.join(["hf", "upload", repo, str(folder), *(["--private"] if private else [])])
        raise UserError(
            f"{key}={repo}: {folder} is written, but the hub did not take it: {_why(error)}; to try again: {again}"
        ) from error


def _why(error: Exception) -> str:
    """Why the hub has refused something."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    text = printable(str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__, 300)
    if status == 401:
        return f"the hub does not know this token; run `hf auth login`, or set HF_TOKEN ({text})"
    if status in (402, 403):
        return f"the token may not write there; check the owner's name and the token's permissions ({text})"
    return f"{type(error).__name__}: {text}"


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
