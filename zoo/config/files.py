"""Where recipes and their overlays lie, and how a YAML file is read.

A recipe is a family x a task x an adapter (zoo.config.recipes.matrix), or a file of its own, `recipes/<name>.yaml`. `recipes/sizes/<family>/<size>.yaml`
and `recipes/hardware/` are overlays: `cpu`, and `gpu` for all that zoo.config.gpus finds, of which there may be several, as in 8xh200 or, on two nodes, 2x8xh200.
A path to a file of the user's own is taken wherever a name is.
"""

from __future__ import annotations

import os
import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from zoo.config.devices import gpu_count, gpu_memory, gpu_name
from zoo.config.gpus import GPUS, find_gpu, gpu_of_device, near_gpus
from zoo.config.layers.keys import nearest
from zoo.config.layers.layer import ROWS_FILE, Layer, filled
from zoo.config.layers.reader import UnreadableError, as_text, read_text, read_yaml
from zoo.config.recipes.matrix import RecipeParts, names_in, recipe_names, size_order
from zoo.errors import ConfigError
from zoo.files import expanded

AUTO, CPU = "auto", "cpu"  # hardware= by the GPUs that are here; without one
_GPU = "gpu"  # the overlay of any
_COUNTED = re.compile(r"(?:(\d{1,9})x)?(\d{1,9})x([\w-]+)", re.ASCII)
_NAME = re.compile(r"[A-Za-z_][\w.-]{0,99}(?:\[\d+\][\w.]*)?", re.ASCII)


def size_names(family: str) -> list[str]:
    """Sizes of `family`, from the smallest; empty when there are none."""
    folder = files("zoo.recipes") / "sizes" / family
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted((name.removesuffix(".yaml") for name in names if name.endswith(".yaml")), key=size_order)


def root_recipes() -> list[str]:
    """Names of the recipes that train all weights by supervised fine-tuning, one for each family."""
    return [RecipeParts(family).name for family in names_in("families")]


def read_recipe(name_or_path: str, folder: Path | None = None) -> Layer:
    """The recipe file of that name or path; `folder` is one that a relative path may start from."""
    path = as_path(name_or_path)
    if ROWS_FILE.fullmatch(name_or_path) and not name_or_path.endswith(".json"):
        raise ConfigError(
            f"recipe={name_or_path}: a file of rows, and no recipe; name a recipe, and the rows as data.train={name_or_path}: "
            f"zoo train recipe={root_recipes()[0]} data.train={name_or_path}"
        )
    if path is None:
        if name_or_path not in names_in():
            raise ConfigError(f"recipe={name_or_path}: {_unknown('recipe', name_or_path, recipe_names())}")
        return _read(files("zoo.recipes") / f"{name_or_path}.yaml")
    if not path.is_absolute() and folder is not None and (folder / path).exists():
        path = folder / path
    if not path.exists():
        near = nearest(path.stem, recipe_names())
        raise ConfigError(f"recipe={name_or_path}: no such file; recipes by name: {', '.join(near) or 'zoo list'}")
    if path.is_dir():
        hint = f"rows are named as data.train={name_or_path}"
        if (path / "config.yaml").is_file():
            hint = "a run's recipe is its config.yaml"
        elif (path / "config.json").is_file():
            hint = f"weights are named as model.init={name_or_path}"
        raise ConfigError(f"recipe={name_or_path}: a folder; wanted a YAML file ({hint})")
    return _read(path)


def read_part(kind: str, name: str) -> Layer:
    """The file of a family, a task or an adapter that comes with zoo; `kind` is its folder."""
    return _read(files("zoo.recipes") / kind / f"{name}.yaml")


def read_size(family: str, size: str) -> Layer:
    """The overlay of `size` for `family`, or the user's own file when `size` is a path."""
    return _read_overlay("size", size, size_names(family), files("zoo.recipes") / "sizes" / family)


def read_hardware(name: str) -> Layer:
    """The overlay of so many GPUs of a kind ("8xh200", "2x8xh100", "4x80gb"), of "cpu", or of the user's own file.

    Its `machine` has the GPU's name and memory, and the numbers of GPUs and nodes.
    """
    counted = _COUNTED.fullmatch(name)
    nodes, gpus, kind = counted.groups() if counted else (None, "1", name)
    folder, gpu = files("zoo.recipes") / "hardware", find_gpu(kind)
    if gpu is None:
        if counted and kind == CPU:
            raise ConfigError(f"hardware={name}: {kind} is no GPU to have several of; write hardware={kind}")
        if kind != CPU and as_path(name) is None:
            before = name.removesuffix(kind)  # the numbers that were typed
            near = [f"{before}{gpu}" for gpu in near_gpus(kind)] if before else nearest(kind, [CPU, AUTO, *GPUS])
            known = f"nearest: {', '.join(near)}" if near else "`zoo list` shows the names"
            other = "; any other GPU by its memory: 8x80gb" if before else ""
            raise ConfigError(f"hardware={name}: no such hardware; {known}{other}")
        return _read_overlay("hardware", name, [CPU], folder)
    if not int(gpus) or not int(nodes or 1):
        raise ConfigError(f"hardware={name}: wanted at least one of them")
    machine = {"gpu": gpu.name, "gpus": int(gpus), "nodes": int(nodes or 1), "memory_gb": gpu.memory_gb}
    layer = _read(folder / f"{_GPU}.yaml")
    return Layer(layer.origin, {**layer.tree, "machine": machine})


def hardware_layers(name: str) -> list[Layer]:
    """The layers of `hardware=NAME`; `auto` is `cpu` where there is no GPU, else the GPUs that are here."""
    if name != AUTO:
        return [read_hardware(name)]
    gpus = gpu_count()
    if not gpus:
        return [read_hardware(CPU)]
    kind = gpu_of_device(gpu_name())
    memory = round(gpu_memory() / 1e9, 1)
    machine = {"gpu": kind.name if kind else None, "gpus": gpus, "nodes": nodes(), "memory_gb": memory}
    return [_read(files("zoo.recipes") / "hardware" / f"{_GPU}.yaml"), Layer("the GPUs here", {"machine": machine})]


def nodes() -> int:
    """Nodes of the run, as torchrun or SLURM says."""
    for all_ranks, of_node in (("WORLD_SIZE", "LOCAL_WORLD_SIZE"), ("SLURM_JOB_NUM_NODES", None)):
        try:
            if all_ranks in os.environ and (of_node is None or of_node in os.environ):
                return max(1, int(os.environ[all_ranks]) // (int(os.environ[of_node]) if of_node else 1))
        except ValueError:
            raise ConfigError(f"{all_ranks}={os.environ[all_ranks]}: wanted a whole number") from None
    return 1


def as_path(name: str) -> Path | None:
    """`name` as a path when it is written like one: a suffix of YAML or JSON, or a folder in it."""
    looks_so = name.endswith((".yaml", ".yml", ".json")) or "/" in name or "\\" in name
    return expanded(name) if looks_so else None


def _unknown(kind: str, name: str, known: list[str]) -> str:
    near = nearest(name[:100], known)
    hint = f"nearest: {', '.join(near)}" if near else "`zoo list` shows them"
    return f"no such {kind}; {hint}"


def _read_overlay(kind: str, name: str, known: list[str], folder: Traversable) -> Layer:
    path = as_path(name)
    if path is None:
        if name not in known:
            raise ConfigError(f"{kind}={name}: {_unknown(kind, name, known)}")
        return _read(folder / f"{name}.yaml")
    if not path.exists() or path.is_dir():
        raise ConfigError(f"{kind}={name}: no such file; names that are known: {', '.join(known)}")
    return _read(path)


def _read(file: Traversable) -> Layer:
    """The file's keys as plain dicts; raises ConfigError with file and line where it is no YAML mapping."""
    try:
        parsed = read_yaml(read_text(file) if isinstance(file, Path) else as_text(file.read_bytes()))
    except UnreadableError as error:
        where = f"{file}:{error.line}: no valid YAML" if error.line else str(file)
        near = file.read_bytes().splitlines()[max(0, error.line - 2) : error.line] if error.line else []
        tab = any(b"\t" in text[: len(text) - len(text.lstrip())] for text in near)
        hint = "; the line begins with a tab: indent by spaces" if tab else ""
        raise ConfigError(f"{where}: {error}{hint}") from None
    if not isinstance(parsed, dict | None):
        rows = f" (rows are named as data.train={file})" if str(file).endswith(".json") else ""
        kind = f"a list{rows}" if isinstance(parsed, list) else "one value"
        raise ConfigError(f"{file}: wanted keys and values (`train:` and so on), found {kind}")
    tree = parsed or {}
    odd = [key for key in tree if not isinstance(key, str) or not _NAME.fullmatch(key)]
    if odd:  # and its text may be anybody's
        raise ConfigError(f"{file}: {len(odd)} of its {len(tree)} keys can be none of a recipe; is it one?")
    return Layer(str(file), {key: filled(value, key, f"{file}: ") for key, value in tree.items()})
