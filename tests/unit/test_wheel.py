"""A wheel holds everything that the checkout does, and runs in an environment of its own."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import zoo

REPO = Path(__file__).parents[2]
FOLDERS = {"zoo": "zoo", "models": "zoo/models", "bridges": "zoo/bridges", "recipes": "zoo/recipes"}


def skip_caches(folder: str, names: list[str]) -> set[str]:
    return {name for name in names if name == "__pycache__" or name.startswith(".")}


def build(kind: str, source: Path, out: Path) -> None:
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    env = {**os.environ, "GITHUB_SERVER_URL": "https://example.org", "GITHUB_REPOSITORY": "some/zoo"}
    done = subprocess.run([sys.executable, "-c", code], cwd=source, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as for a release, from the sdist of a copy, with the setuptools of this environment: no network."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for folder in (*FOLDERS, "benchmarks"):  # which the wheel leaves out
        shutil.copytree(REPO / folder, source / folder, ignore=skip_caches)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(REPO / name, source)
    build("sdist", source, out)
    (sdist,) = out.glob("zoo_train-*.tar.gz")
    shutil.unpack_archive(sdist, out, filter="data")
    build("wheel", out / sdist.name.removesuffix(".tar.gz"), out)
    return next(out.glob("zoo_train-*.whl"))


def test_wheel_holds_every_file(wheel: Path) -> None:
    wanted = set()
    for folder, home in FOLDERS.items():
        for root, folders, files in os.walk(REPO / folder):
            folders[:] = set(folders) - skip_caches(root, folders)
            base = Path(home, Path(root).relative_to(REPO / folder))
            wanted |= {(base / name).as_posix() for name in files if not name.startswith(".")}
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert "zoo/py.typed" in held  # type checkers read zoo's annotations
    assert held == wanted, f"missing: {sorted(wanted - held)}, too many: {sorted(held - wanted)}"


def test_wheel_declares_what_users_need(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        read = {
            name.split(".dist-info/")[1]: archive.read(name).decode() for name in archive.namelist() if "-info/" in name
        }
    assert "zoo = zoo.cli.main:main" in read["entry_points.txt"]
    assert "Apache License" in read["licenses/LICENSE"]
    for extra in ("te", "kernels", "flash", "wandb", "docs", "dev"):
        assert f"Provides-Extra: {extra}" in read["METADATA"]
    assert f"\nVersion: {zoo.__version__}\n" in read["METADATA"]
    assert "\nProject-URL: Source, https://example.org/some/zoo\n" in read["METADATA"]


@pytest.mark.slow
def test_installed_wheel_runs_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """Its own environment holds the wheel alone; dependencies are looked up in this one's site-packages.

    They are named by a .pth file, and a .pth file's folder has its own .pth files left unread: so this
    environment's editable install of zoo stays out of sight.
    """
    home = tmp_path / "env"
    venv.create(home)
    python = home / "bin" / "python"
    site = next(home.glob("lib/python*/site-packages"))
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], check=True)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run(*command: str) -> str:
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        done = subprocess.run(
            [str(home / "bin" / command[0]), *command[1:]], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    where = run("python", "-c", "import zoo, zoo.models, zoo.bridges, zoo.recipes; print(zoo.models.__file__)")
    assert where.startswith(str(site))
    assert "train" in run("zoo", "--help")
    assert "qwen3_omni" in run("zoo", "list")
    demo = ["recipe=qwen3_omni_sft", "size=tiny", "nproc=1", "train.steps=2", f"run.dir={tmp_path}/run"]
    run("zoo", "train", *demo)
    assert (tmp_path / "run" / "train.jsonl").exists()
