"""How tests are shared out: what is slow, in which turn it runs, and what a run of continuous integration says in the end."""

import importlib.util
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from support import turns

REPO = Path(__file__).parents[2]
TESTS = REPO / "tests"


@pytest.fixture(scope="module")
def run_tests() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_tests", REPO / "scripts/run_tests.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pieces_hold_every_test_once_and_an_equal_share_of_each_file() -> None:
    names = [f"tests/{file}.py::test_{n}[a::b]" for file in "abcdef" for n in range(13)]
    dealt = turns.pieces(names, 5)
    assert list(dealt) == names and set(dealt.values()) == set(range(5))
    for file in "abcdef":
        shares = Counter(dealt[name] for name in names if name.startswith(f"tests/{file}.py"))
        assert max(shares.values()) - min(shares.values()) <= 1
    assert turns.pieces([*names, "tests/a.py::test_more"], 5).items() >= dealt.items(), "others keep their piece"


def test_runs_with_successive_numbers_cover_all_pieces(run_tests: ModuleType) -> None:
    for name in ("ZOO_TEST_TURN", "GITHUB_RUN_NUMBER"):
        chosen = [run_tests.chosen_turn({name: str(number)})[0] for number in range(7, 7 + run_tests.TURNS)]
        assert sorted(chosen) == list(range(1, run_tests.TURNS + 1))
    assert run_tests.chosen_turn({"ZOO_TEST_TURN": "2", "GITHUB_RUN_NUMBER": "4"})[0] == 3
    for first in range(1, run_tests.TURNS + 1):
        assert run_tests.order(first)[0] == first and len(set(run_tests.order(first))) == run_tests.TURNS


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


def test_the_piece_follows_from_the_number_of_commits(tmp_path: Path, run_tests: ModuleType) -> None:
    main, shallow = tmp_path / "main", tmp_path / "shallow"
    main.mkdir()
    git(main, "init", "-q")
    chosen = []
    for number in range(run_tests.TURNS):
        git(main, "commit", "-q", "--allow-empty", "-m", str(number))
        turn, reason = run_tests.chosen_turn({}, main)
        assert reason.endswith(f"is number {number + 1}")
        chosen.append(turn)
    assert sorted(chosen) == list(range(1, run_tests.TURNS + 1))
    git(tmp_path, "clone", "-q", "--depth", "1", main.as_uri(), str(shallow))
    turn, reason = run_tests.chosen_turn({}, shallow)
    assert 1 <= turn <= run_tests.TURNS and "shallow" in reason


def test_summaries_are_read_and_summed(run_tests: ModuleType) -> None:
    output = "noise\n===== 2 failed, 31 passed, 1 skipped, 3 warnings in 1.20s =====\n"
    first = run_tests.counts(output)
    assert first == {"failed": 2, "passed": 31, "skipped": 1, "warning": 3}
    quiet = run_tests.counts("3 passed, 1 error in 100.00s (0:01:40)\n")
    assert quiet == {"passed": 3, "error": 1}
    assert run_tests.summed(first + quiet, 9) == "==== 2 failed, 34 passed, 1 skipped, 1 error in 9.00s ===="
    assert run_tests.counts("") == {}


@pytest.mark.slow
def test_a_slow_case_that_fails_runs_once_more(
    tmp_path: Path, run_tests: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """A case is slow by its place among the function's cases, and alone it is the first, which is fast."""
    mark = "import pytest\ncases = 0\ndef pytest_itemcollected(item):\n    global cases\n"
    mark += "    cases += 1\n    if cases > 1: item.add_marker(pytest.mark.slow)\n"
    mark += "def pytest_configure(config): config.addinivalue_line('markers', 'slow')\n"
    (tmp_path / "conftest.py").write_text(mark)
    flaky = "import pytest\nfrom pathlib import Path\nMARK = Path(__file__).with_suffix('.tried')\n"
    flaky += "@pytest.mark.parametrize('case', range(3))\ndef test_flaky(case):\n"
    flaky += "    tried = MARK.exists()\n    MARK.touch()\n    assert tried or case < 2\n"
    flaky = flaky.replace("MARK.touch()", "case == 2 and MARK.touch()")
    (tmp_path / "test_flaky.py").write_text(flaky)
    runs = run_tests.Runs(1, ["-p", "no:xdist"])
    runs.run([str(tmp_path / "test_flaky.py")], "-m", "slow")
    assert runs.end() == 0 and "==== 2 passed in" in capsys.readouterr().out


def test_tests_that_start_ranks_share_no_world() -> None:
    """Only the first group is spread so that tests with a shared world come last."""
    for folder in ("cli", "distributed", "slow"):
        for path in (TESTS / folder).rglob("*.py"):
            assert "cpu_world" not in path.read_text(), f"{path}: move it to tests/parity"


PROGRAM = """
import pytest

@pytest.mark.slow
def test_short(): pass

@pytest.mark.slow(minutes=600)
def test_long(): pass
"""


def test_no_test_starts_when_its_time_is_not_there(tmp_path: Path) -> None:
    """In a project of its own, with the options that conftest.py gives."""
    (tmp_path / "test_a.py").write_text(PROGRAM)
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(TESTS)!r})\nfrom support import turns\n"
        "pytest_addoption, pytest_runtest_setup = turns.add_options, turns.leave_out_when_late\n"
        "def pytest_terminal_summary(terminalreporter): turns.list_left_out(terminalreporter)\n"
        "def pytest_configure(config): config.addinivalue_line('markers', 'slow')\n"
    )
    until = time.time() + 3600
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "--until", f"{until}", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "1 passed, 1 skipped" in done.stdout, done
    assert "1 tests left out: no time remained for them" in done.stdout and "::test_long" in done.stdout


@pytest.mark.slow
def test_what_fails_alone_too_fails_the_run(
    tmp_path: Path, run_tests: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, good = tmp_path / "test_bad.py", tmp_path / "test_good.py"
    bad.write_text("def test_bad(): assert False\n")
    good.write_text("def test_good(): pass\n")
    runs = run_tests.Runs(1, ["-p", "no:xdist"])
    runs.run([str(good)])
    assert runs.end() == 0 and "==== 1 passed in" in capsys.readouterr().out
    runs.run([str(bad)])
    assert runs.end() == 1 and "==== 1 failed, 1 passed in" in capsys.readouterr().out
    flaky = "from pathlib import Path\nMARK = Path(__file__).with_suffix('.tried')\n"
    flaky += "def test_flaky():\n    tried = MARK.exists()\n    MARK.touch()\n    assert tried\n"
    (tmp_path / "test_flaky.py").write_text(flaky)
    runs = run_tests.Runs(1, ["-p", "no:xdist"])
    runs.run([str(tmp_path / "test_flaky.py")])
    assert runs.end() == 0 and "==== 1 passed in" in capsys.readouterr().out
