"""Files beside the code (container, workflow, forms, metadata) agree with the package."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import zoo

REPO = Path(__file__).parents[2]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def requirement(text: str) -> tuple[str, str]:
    """Name and range of a dependency, without extras and markers."""
    match = re.match(r"([\w-]+)(?:\[.*?\])?([^;]*)", text)
    assert match is not None
    return match[1], match[2].strip()


def test_installing_names_ranges_of_the_package() -> None:
    """docs/install.md: a row `| name | `range` |` for Python and each dependency whose range it explains."""
    rows = re.findall(r"^\| ([\w-]+) \| `([^`]*[<>=][^`]*)` \|", (REPO / "docs/install.md").read_text(), re.MULTILINE)
    ranges = {"Python": PROJECT["requires-python"], **dict(map(requirement, PROJECT["dependencies"]))}
    bounded = {name for name, wanted in ranges.items() if "<" in wanted}
    assert dict(rows) == {name: ranges[name] for name in {*bounded, "torch"}}


def test_the_tested_versions_lie_in_the_ranges() -> None:
    """constraints.txt pins every dependency of a range to a version in it."""
    lines = (REPO / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    for name, wanted in map(requirement, PROJECT["dependencies"]):
        if name != "packaging":
            assert Version(pins[name]) in SpecifierSet(wanted), name


def test_the_lowest_versions_are_the_lower_bounds() -> None:
    script = runpy.run_path(str(REPO / "scripts/lowest.py"))["lowest"]
    assert script("torch>=2.10") == "torch==2.10"
    assert script("transformer-engine[core_cu13,pytorch]>=2.20,<2.21") == "transformer-engine==2.20"
    with pytest.raises(ValueError, match="lower bound"):
        script("torch<3")
    for dependency in PROJECT["dependencies"]:
        name, wanted = requirement(dependency)
        pinned, _, version = script(dependency).partition("==")
        assert pinned == name and Version(version) in SpecifierSet(wanted)
    ranges = dict(map(requirement, PROJECT["dependencies"]))
    assert ranges["megatron-core"] == ">=0.19.2,<0.20", "the minor that zoo's shims know"


def test_the_workflow_runs_every_environment() -> None:
    job = yaml.safe_load((REPO / ".github/workflows/ci.yml").read_text())["jobs"]["versions"]
    environments = runpy.run_path(str(REPO / "scripts/check_environment.py"))["ENVIRONMENTS"]
    assert job["strategy"]["matrix"]["environment"] == [*environments]
    commands = [step.get("run", "") for step in job["steps"]]
    assert "python scripts/check_environment.py ${{ matrix.environment }}" in commands
    assert ".venv-${{ matrix.environment }}/bin/python scripts/run_tests.py fast" in commands
    for extras, resolution in environments.values():
        assert set(extras.split(",")) <= set(EXTRAS) and resolution in ("lowest", "newest")


def test_each_environment_has_its_turn() -> None:
    script = runpy.run_path(str(REPO / "scripts/check_environment.py"))
    assert {script["whose_turn"](number) for number in range(40, 43)} == set(script["ENVIRONMENTS"])
    assert "scripts/check_environment.py ||" in (REPO / ".ci/run").read_text()


def test_installing_lists_the_extras() -> None:
    section = (REPO / "docs/install.md").read_text().partition("## Extras")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == set(EXTRAS)


def test_the_image_is_built_from_what_the_wheel_needs() -> None:
    lines = (REPO / "Dockerfile").read_text().splitlines()
    copied = {word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]}
    files = {"pyproject.toml", "setup.py", "constraints.txt", "README.md", "LICENSE"}
    assert copied == files | {"zoo", "models", "bridges", "recipes"}
    assert all((REPO / name).exists() for name in copied)
    ignored = (REPO / ".dockerignore").read_text().split()
    assert {line[1:] for line in ignored if line.startswith("!")} == copied


def test_the_image_installs_extras_that_exist() -> None:
    text = (REPO / "Dockerfile").read_text()
    page = (REPO / "docs/install.md").read_text()
    named = {name for found in re.findall(r"EXTRAS=([\w,]+)", page) for name in found.split(",")}
    assert named <= set(EXTRAS) and set(re.findall(r"\*,(\w+),\*", text)) <= set(EXTRAS)
    (triton,) = set(re.findall(r"'(triton[^']+)'", text))
    assert triton in page


def test_the_image_installs_what_the_project_asks_for_by_the_tested_versions() -> None:
    """Its Python one-liners, run here; each layer of packages follows constraints.txt, which pins each direct dependency."""
    text = (REPO / "Dockerfile").read_text().replace("\\\n", "")
    programs = re.findall(r'python -c "([^"]+)"', text)

    def lines(program: str, *arguments: str) -> list[str]:
        command = [sys.executable, "-c", program, *arguments]
        return subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout.splitlines()

    assert lines(programs[0]) == PROJECT["dependencies"]
    assert lines(programs[1], "te,kernels") == [*EXTRAS["te"], *EXTRAS["kernels"]] and len(programs) == 2
    for install in re.findall(r"pip install ([^;&]+)", text):
        assert "-c constraints.txt" in install or "--no-deps" in install or install.startswith("'triton")
    pinned = {line.partition("==")[0] for line in (REPO / "constraints.txt").read_text().splitlines()}
    direct = {re.split(r"[<>=\[]", line)[0] for line in PROJECT["dependencies"]} - {"packaging"}
    assert direct <= pinned


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
def test_the_image_by_hadolint() -> None:
    done = subprocess.run(["hadolint", REPO / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_workflow_runs_what_ci_runs_on_every_supported_python() -> None:
    workflow = yaml.safe_load((REPO / ".github/workflows/ci.yml").read_text())
    tests = workflow["jobs"]["test"]
    supported = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", text)]
    assert tests["strategy"]["matrix"]["python"] == supported
    assert {"run": ".ci/run"} in tests["steps"]
    assert os.access(REPO / ".ci/run", os.X_OK)
    assert {"run": "make docs"} in workflow["jobs"]["docs"]["steps"]
    assert {
        name for extras in workflow["jobs"]["image"]["strategy"]["matrix"]["extras"] for name in extras.split(",")
    } <= {"", *EXTRAS}


@pytest.mark.parametrize("name", ["bug.yml", "feature.yml"])
def test_issue_forms_are_forms(name: str) -> None:
    """The rules of GitHub's form schema that a form fails on."""
    form = yaml.safe_load((REPO / ".github/ISSUE_TEMPLATE" / name).read_text())
    assert form["name"] and form["description"]
    assert len({item["id"] for item in form["body"]}) == len(form["body"])
    for item in form["body"]:
        assert item["type"] in ("textarea", "input", "dropdown", "checkboxes") and item["attributes"]["label"]
        assert all(option["label"] for option in item["attributes"].get("options", ()))


def test_hooks_of_commits_run_tools_of_the_environment() -> None:
    (local,) = yaml.safe_load((REPO / ".pre-commit-config.yaml").read_text())["repos"]
    tools = {requirement(dependency)[0] for dependency in EXTRAS["dev"]}
    files = [hook for hook in local["hooks"] if "stages" not in hook]
    for hook in files:
        python, flag, tool, *_ = hook["entry"].split()
        assert (python, flag) == (".venv/bin/python", "-m") and tool in tools
    assert [hook["id"] for hook in files] == ["ruff-check", "ruff-format"]


def test_the_version_stands_in_one_place_and_others_agree() -> None:
    metadata = tomllib.loads((REPO / "pyproject.toml").read_text())
    assert "version" not in PROJECT and "version" in PROJECT["dynamic"]
    assert metadata["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "zoo.__version__"}
    citation = yaml.safe_load((REPO / "CITATION.cff").read_text())
    assert zoo.__version__ == str(citation["version"])
    headings = re.findall(r"^## \[(.+?)\]", (REPO / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert next(name for name in headings if name != "Unreleased") == zoo.__version__


def test_a_tag_releases_wheel_sdist_and_documentation() -> None:
    workflow = yaml.safe_load((REPO / ".github/workflows/release.yml").read_text())
    assert workflow[True]["push"] == {"tags": ["v*"]}  # YAML reads `on` as true
    runs = {name: "\n".join(step.get("run", "") for step in job["steps"]) for name, job in workflow["jobs"].items()}
    assert "python -m build" in runs["distribution"] and "twine check --strict dist/*" in runs["distribution"]
    assert "make docs" in runs["documentation"]
    assert workflow["jobs"]["release"]["needs"] == ["distribution", "documentation"]


def notes(tag: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPO / "scripts/release_notes.py"), tag]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_release_is_described_by_its_section_of_the_changelog() -> None:
    described = notes(f"v{zoo.__version__}")
    assert described.returncode == 0, described.stderr
    lines = described.stdout.splitlines()
    assert lines[0] and not any(line.startswith("## ") for line in lines)
    changelog = (REPO / "CHANGELOG.md").read_text()
    assert described.stdout.strip() in changelog and len(changelog.split()) <= 800
    other = notes("v9.9.9")
    assert other.returncode == 1 and f"v9.9.9 is not v{zoo.__version__}" in other.stderr


def test_tensors_are_compared_by_what_says_how_they_differ() -> None:
    """`assert torch.equal(...)` prints nothing; torch.testing.assert_close does, and is as strict with rtol=0 and atol=0."""
    bare = re.compile(r"^\s*assert (?:all\()?(?:map\()?torch\.equal\b", re.MULTILINE)
    assert not [path for path in (REPO / "tests").rglob("*.py") if bare.search(path.read_text())]
