"""Finds the packages; everything else about the distribution stands in pyproject.toml.

`models/`, `bridges/` and `recipes/` lie at the top of the repository and are imported as `zoo.models`,
`zoo.bridges` and `zoo.recipes`. setuptools can map the folders from pyproject.toml but not search them, so
that a new family would have to be listed by hand: hence this file.
"""

from setuptools import find_packages, setup

FOLDERS = {"zoo": "zoo", "zoo.models": "models", "zoo.bridges": "bridges", "zoo.recipes": "recipes"}

setup(
    package_dir=FOLDERS,
    packages=[
        package
        for root, folder in FOLDERS.items()
        for package in (root, *(f"{root}.{name}" for name in find_packages(folder)))
    ],
)
