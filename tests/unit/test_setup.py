"""The setup finds a Python that works, and never takes half an environment for a whole one."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
TOOLS = (
    "basename", "cat", "cksum", "cp", "dirname", "grep", "head", "mkdir", "ps", "rm", "sed", "sh", "sort", "touch", "tr",
)  # fmt: skip

# Stands in for another Python: runs the code it is given after lying about version, path and modules.
FAKE = """
import sys
version, path, lacks = sys.argv[1], sys.argv[2], sys.argv[3]
sys.version_info = (*map(int, version.split(".")), "final", 0)
sys.executable = sys._base_executable = path
if lacks != "-":
    sys.modules[lacks] = None
exec(sys.argv[5])
"""


def fake_python(path: Path, version: str, lacks: str = "-") -> Path:
    fake = path.parent / f".{path.name}.py"
    script(path, f'exec "{sys.executable}" "{fake}" {version} "{path}" {lacks} "$@"')
    fake.write_text(FAKE)
    return path


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder with bin/ (the only PATH, with the few tools the scripts call) and home/."""
    for name in ("bin", "home"):
        (tmp_path / name).mkdir()
    for tool in TOOLS:
        (tmp_path / "bin" / tool).symlink_to(str(shutil.which(tool)))
    return tmp_path


def run(machine: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    base = {"PATH": f"{machine}/bin", "HOME": f"{machine}/home", "HOMEBREW_PREFIX": f"{machine}/none"}
    return subprocess.run(command, env=base | env, capture_output=True, text=True, timeout=60)


def find(machine: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return run(machine, "sh", str(REPO / "scripts/find_python.sh"), **env)


def assert_took(done: subprocess.CompletedProcess[str], path: Path, version: str) -> None:
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(path)
    assert done.stderr.strip() == f"Using Python {version} at {path}"


PYENV, UV = "home/.pyenv/versions/3.12.1", "home/.local/share/uv/python/cpython-3.12.9-linux"
CONDA = "home/miniforge3"
LAYOUTS = {
    "beside an old python3": ({"bin/python3": "3.9.18", "bin/python3.12": "3.12.4"}, "bin/python3.12"),
    "python3 itself": ({"bin/python3": "3.13.1"}, "bin/python3"),
    "the lower of two": ({"bin/python3.13": "3.13.1", "bin/python3.12": "3.12.4"}, "bin/python3.12"),
    "not one that is too new": ({"bin/python3": "3.14.0", "bin/python3.13": "3.13.1"}, "bin/python3.13"),
    "pyenv": ({"bin/python3": "3.11.7", f"{PYENV}/bin/python3": "3.12.1"}, f"{PYENV}/bin/python3"),
    "uv's folder": ({f"{UV}/bin/python3": "3.12.9"}, f"{UV}/bin/python3"),
    "Homebrew": ({"brew/bin/python3.13": "3.13.2"}, "brew/bin/python3.13"),
    "conda environment": ({f"{CONDA}/bin/python3": "3.10.2", f"{CONDA}/envs/a/bin/python3": "3.12.3"}, f"{CONDA}/envs/a/bin/python3"),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_finder_takes_the_right_python(machine: Path, name: str) -> None:
    pythons, wanted = LAYOUTS[name]
    for path, version in pythons.items():
        fake_python(machine / path, version)
    done = find(machine, HOMEBREW_PREFIX=f"{machine}/brew")
    assert_took(done, machine / wanted, pythons[wanted])


def test_finder_passes_over_a_shim_that_does_not_start(machine: Path) -> None:
    script(machine / "shims/python3.12", 'echo "pyenv: python3.12: command not found" >&2; exit 127')
    script(machine / "shims/python3", "exit 127")
    good = fake_python(machine / "bin/python3.12", "3.12.4")
    assert_took(find(machine, PATH=f"{machine}/shims:{machine}/bin"), good, "3.12.4")


def test_finder_asks_uv(machine: Path) -> None:
    good = fake_python(machine / "elsewhere/python", "3.13.2")
    script(machine / "bin/uv", f'[ "$1 $2" = "python find" ] && echo "{good}"')
    assert_took(find(machine), good, "3.13.2")


def test_finder_fails_with_one_sentence(machine: Path) -> None:
    fake_python(machine / "bin/python3", "3.9.18")
    fake_python(machine / "bin/python3.12", "3.12.3", lacks="ensurepip")
    done = find(machine)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    for word in ("3.12 or 3.13", "3.9.18", "3.12.3-without-venv", "install", "ZOO_PYTHON"):
        assert word in done.stderr


def test_named_python_is_taken_or_refused(machine: Path) -> None:
    fake_python(machine / "bin/python3.12", "3.12.4")
    other = fake_python(machine / "other/python", "3.13.1")
    old = fake_python(machine / "other/old", "3.10.1")
    assert_took(find(machine, ZOO_PYTHON=str(other)), other, "3.13.1")
    for wrong, reason in ((str(old), "is Python 3.10.1"), (f"{machine}/nothing", "is no Python that runs")):
        done = find(machine, ZOO_PYTHON=wrong)
        assert (done.returncode, done.stdout) == (1, "")
        assert f"ZOO_PYTHON={wrong} {reason}" in done.stderr


@pytest.fixture
def project(machine: Path) -> Path:
    """A tiny project with zoo's setup script and a Python whose `pip install` only makes bin/zoo."""
    project = machine / "project"
    shutil.copytree(REPO / "scripts", project / "scripts")
    (project / "pyproject.toml").write_text("[project]\n")
    (project / "setup.py").write_text("")
    (project / "constraints.txt").write_text("")
    # `python -m venv --clear DIR` gives DIR a copy of this fake; `python -m pip` fails where a file says so.
    body = f"""
case "$1 $2" in
  "-m venv") rm -rf "$4"; mkdir -p "$4/bin"; cp "$0" "$4/bin/python"; echo "#!$PWD/$4/bin/python" > "$4/bin/pip" ;;
  "-m pip") echo "pip $*" >> {machine}/log; [ ! -e {machine}/broken ] || exit 1; touch "${{0%python}}zoo"
     case "$*" in *" uv") cp "$0" "${{0%python}}uv" ;; esac ;;
  "pip install") echo "uv $*" >> {machine}/log ;;
  *) exec "{sys.executable}" "{machine}/fake.py" 3.12.4 "$0" - "$@" ;;
esac"""
    (machine / "fake.py").write_text(FAKE)
    script(machine / "bin/python3", body)
    return project


def set_up(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(project.parent, "sh", str(project / "scripts/setup_env.sh"), *arguments)


def installs(project: Path) -> list[str]:
    """The arguments of every call of pip so far."""
    return (project.parent / "log").read_text().splitlines()


def test_environment_is_made_once_and_renewed_when_pyproject_changes(project: Path) -> None:
    first = set_up(project)
    assert first.returncode == 0, first.stderr
    assert "Ready: .venv" in first.stdout
    again = set_up(project)
    assert (again.returncode, again.stdout, len(installs(project))) == (0, "", 1)

    (project / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    assert "Updating .venv" in set_up(project).stdout and len(installs(project)) == 2
    assert set_up(project).stdout == ""


def test_versions_are_the_tested_or_the_lowest_or_the_newest(project: Path) -> None:
    assert set_up(project).returncode == 0
    assert "--constraint constraints.txt" in installs(project)[-1]
    done = set_up(project, ".venv", "dev", "newest")
    assert (done.returncode, "Updating .venv" in done.stdout) == (0, True), done.stderr
    assert installs(project)[-2].endswith(" uv") and installs(project)[-1].startswith("uv pip install ")
    assert "--upgrade --editable .[dev]" in installs(project)[-1]
    assert set_up(project, ".venv", "dev", "newest").stdout == "" and len(installs(project)) == 3
    odd = set_up(project, ".venv", "dev", "oldest")
    assert (odd.returncode, odd.stderr) == (1, "RESOLUTION=oldest is none of tested, lowest, newest.\n")


def test_interrupted_install_is_made_anew(project: Path) -> None:
    broken = project.parent / "broken"
    broken.touch()
    assert set_up(project).returncode == 1
    (project / ".venv/half").touch()
    broken.unlink()
    mended = set_up(project)
    assert mended.returncode == 0 and "did not finish" in mended.stdout, mended.stderr
    assert not (project / ".venv/half").exists() and set_up(project).stdout == ""


def test_two_at_once_do_not_mix(project: Path) -> None:
    with subprocess.Popen(["sh", "-c", "read _", "setup_env"], stdin=subprocess.PIPE) as other:
        (project / ".venv.zoo-unfinished").write_text(f"{other.pid}\n")
        done = set_up(project)
        assert (done.returncode, done.stdout) == (1, "")
        assert f"Process {other.pid} is making .venv" in done.stderr
        other.kill()
    assert set_up(project).returncode == 0


def test_moved_environment_is_made_anew(project: Path) -> None:
    set_up(project)
    moved = project.rename(project.parent / "moved")
    done = set_up(moved)
    assert "another folder" in done.stdout
    assert done.returncode == 0, done.stderr


def test_finder_and_metadata_agree_on_the_range_of_pythons() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.12,<3.14"
    finder = (REPO / "scripts/find_python.sh").read_text()
    assert "(3, 12) <= tuple(sys.version_info[:2]) <= (3, 13)" in finder
