"""How tests are run: which slow ones come first, what is left out or run once more, and the sum at the end."""

import importlib.util
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

REPO = Path(__file__).parents[2]
TESTS = REPO / "tests"


@pytest.fixture(scope="module")
def run_tests() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_tests", REPO / "scripts/run_tests.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


def test_runs_with_successive_numbers_begin_all_over_the_files(run_tests: ModuleType) -> None:
    files = [f"tests/unit/test_{number}.py" for number in range(100)]
    first = run_tests.rotated(files, 0)
    assert sorted(first) == sorted(files) and first != files
    for start in (0, 7, 1000):
        places = sorted(first.index(run_tests.rotated(files, start + number)[0]) for number in range(8))
        gaps = [after - before for before, after in pairwise([*places, places[0] + 100])]
        assert max(gaps) < 25, "eight runs that get through a quarter of the files leave none out"
    again = run_tests.rotated(files, 3)
    assert sorted(again) == sorted(files) and again == first[first.index(again[0]) :] + first[: first.index(again[0])]


def test_the_number_is_that_of_the_run_or_of_the_commit(tmp_path: Path, run_tests: ModuleType) -> None:
    assert run_tests.run_number({"ZOO_TEST_TURN": "2", "GITHUB_RUN_NUMBER": "4"})[0] == 2
    assert run_tests.run_number({"GITHUB_RUN_NUMBER": "4"})[0] == 4
    main, shallow = tmp_path / "main", tmp_path / "shallow"
    main.mkdir()
    git(main, "init", "-q")
    for number in (1, 2):
        git(main, "commit", "-q", "--allow-empty", "-m", str(number))
        assert run_tests.run_number({}, main)[0] == number
    git(tmp_path, "clone", "-q", "--depth", "1", main.as_uri(), str(shallow))
    assert "shallow" in run_tests.run_number({}, shallow)[1]


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
    flaky += "    tried = MARK.exists()\n    case == 2 and MARK.touch()\n    assert tried or case < 2\n"
    (tmp_path / "test_flaky.py").write_text(flaky)
    runs = run_tests.Runs(1, ["-p", "no:xdist"])
    runs.run([str(tmp_path / "test_flaky.py")], "-m", "slow")
    assert runs.end() == 0 and "==== 2 passed in" in capsys.readouterr().out


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
        f"import sys\nsys.path.insert(0, {str(TESTS)!r})\nfrom support import deadline\n"
        "pytest_addoption, pytest_runtest_setup = deadline.add_options, deadline.leave_out_when_late\n"
        "def pytest_terminal_summary(terminalreporter): deadline.list_left_out(terminalreporter)\n"
        "def pytest_configure(config): config.addinivalue_line('markers', 'slow')\n"
    )
    until = time.time() + 3600
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "--until", f"{until}", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "1 passed, 1 skipped" in done.stdout, done
    assert "1 tests left out: no time remained for them" in done.stdout and "test_a.py: 1" in done.stdout


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
