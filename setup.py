"""Finds the packages and the project's URLs; everything else about the distribution stands in pyproject.toml.

`models/`, `bridges/` and `recipes/` lie at the top of the repository and are imported as `zoo.models`,
`zoo.bridges` and `zoo.recipes`. setuptools can map the folders from pyproject.toml but not search them, so
that a new family would have to be listed by hand: hence this file.
"""

import os

from setuptools import find_packages, setup

FOLDERS = {"zoo": "zoo", "zoo.models": "models", "zoo.bridges": "bridges", "zoo.recipes": "recipes"}


def project_urls() -> dict[str, str]:
    """URLs of the repository that builds a release, as its workflow's environment gives them; none elsewhere."""
    server, repository = (os.environ.get(f"GITHUB_{name}") for name in ("SERVER_URL", "REPOSITORY"))
    if not (server and repository):
        return {}
    home = f"{server}/{repository}"
    pages = {"Documentation": "tree/main/docs", "Issues": "issues", "Changelog": "blob/main/CHANGELOG.md"}
    return {"Source": home, **{name: f"{home}/{page}" for name, page in pages.items()}}


setup(
    package_dir=FOLDERS,
    packages=[
        package
        for root, folder in FOLDERS.items()
        for package in (root, *(f"{root}.{name}" for name in find_packages(folder)))
    ],
    project_urls=project_urls(),
)
