"""scripts/check_commit_message.py, as git runs it."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

REPO = Path(__file__).parents[2]
SCRIPT = REPO / "scripts/check_commit_message.py"
faults = runpy.run_path(str(SCRIPT))["faults"]


@pytest.mark.parametrize(
    "message",
    [
        "Read CSV files with a byte order mark",
        "Pass the group of ranks to the loss\n\nThe global one has ranks of other models.\n",
        "Process rows in the order of the file",
        "Bring the planner's bytes up to what is measured",
        "Re-read a folder that has changed",
        "\n\nAdd a row\n# Please enter the commit message\n# On branch main\n",
        "Add a row\n# ------------------------ >8 ------------------------\ndiff --git a b; was added.\n",
        "Name " + "n" * 66,
        'Revert "Docs: something that was as long as it could be, and longer than that"',
        "fixup! Docs: rows",
    ],
)
def test_messages_that_pass(message: str) -> None:
    assert faults(message) == []


NOT_IMPERATIVE = (
    "Added a row", "Adds a row", "Storing a row", "add a row", "Docs: a row", "CUDA graphs for small rows", "A row that is added",
    "", "# only a comment",
)  # fmt: skip


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        *((text, "imperative") for text in NOT_IMPERATIVE),
        ("Name " + "n" * 67, "under 72 characters: it has 72"),
        ("Add a row.", "full stop"),
        ("Add a row; drop another", "two commits"),
        ("Add a row\nbecause it was missing", "blank line"),
    ],
)
def test_messages_that_do_not(message: str, fault: str) -> None:
    (only,) = faults(message)
    assert fault in only


def test_git_refuses_a_commit(tmp_path: Path) -> None:
    def git(*words: str) -> subprocess.CompletedProcess[str]:
        names = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        return subprocess.run(["git", *names, *words], cwd=tmp_path, capture_output=True, text=True)

    git("init", "-q")
    hook = tmp_path / ".git/hooks/commit-msg"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{SCRIPT}" "$1"\n')
    hook.chmod(0o755)
    refused = git("commit", "--allow-empty", "-m", "Added a row.")
    assert refused.returncode != 0
    assert "not with 'Added'" in refused.stderr and "full stop" in refused.stderr
    assert git("log").returncode != 0  # no commit yet
    assert git("commit", "--allow-empty", "-m", "Add a row").returncode == 0


def test_pre_commit_installs_the_hook() -> None:
    config = yaml.safe_load((REPO / ".pre-commit-config.yaml").read_text())
    assert set(config["default_install_hook_types"]) == {"pre-commit", "commit-msg"}
    (hook,) = [hook for repo in config["repos"] for hook in repo["hooks"] if hook.get("stages") == ["commit-msg"]]
    assert hook["entry"] == f".venv/bin/python {SCRIPT.relative_to(REPO)}"
    assert config["default_stages"] == ["pre-commit"]
