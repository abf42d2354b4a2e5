"""Versions of installed packages, without importing them."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from zoo.errors import UserError

CHECKED = ("torch", "transformers", "megatron-core", "huggingface-hub")  # whose changes have broken zoo before


def installed_version(*distributions: str) -> str | None:
    """The version of the first of these distributions that is installed; None where none is."""
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


@functools.cache
def check_versions() -> None:
    """UserError where a package of `CHECKED` is missing, or is installed in a version outside the range that zoo declares.

    A build's own suffix is left out of the comparison: NVIDIA's torch 2.11.0a0+nv26.1 counts as 2.11.0.
    """
    from packaging.requirements import Requirement
    from packaging.version import Version

    for requirement in map(Requirement, _declared()):
        if requirement.name not in CHECKED or requirement.marker is not None:
            continue
        installed = installed_version(requirement.name)
        if installed is None or not requirement.specifier.contains(Version(installed).base_version):
            present = "not installed" if installed is None else f"{installed} is installed"
            raise UserError(
                f"{requirement.name}: {present}; zoo works with {requirement.specifier}; pip install '{requirement}'"
            )


def _declared() -> Sequence[str]:
    """zoo's requirements: those of the clone it lies in, since an install in place keeps those of its day; else its metadata's."""
    clone = Path(__file__).parents[1] / "pyproject.toml"
    if clone.is_file():
        project = tomllib.loads(clone.read_text(encoding="utf-8")).get("project", {})
        if project.get("name") == "zoo-train":
            return project["dependencies"]
    try:
        return requires("zoo-train") or ()
    except PackageNotFoundError:  # laid out by hand, without pip
        return ()
