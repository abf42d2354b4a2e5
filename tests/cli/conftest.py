"""A server of `zoo` commands with small data, and one finished run that tests share."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import Ended, Zoo, bundled, environment, text_row, write_rows


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zoo]:
    folder = tmp_path_factory.mktemp("zoo")
    rows = [text_row(100 + 7 * n) for n in range(10)]
    rows[3:3] = [bundled("image")]
    write_rows(folder / "train.jsonl", rows)
    write_rows(folder / "heldout.jsonl", [text_row(11), bundled("image")])
    command, pipe = [sys.executable, str(Path(__file__).parents[1] / "support" / "warm_zoo.py")], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment()) as server:
        zoo = Zoo(server, folder, folder)
        assert zoo.answer() == {"ready": True}
        yield zoo
        assert server.stdin is not None
        server.stdin.close()


@pytest.fixture(scope="session")
def finished(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """A run that came to its end, not to be written to, and what it printed."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    done = zoo.train(run_dir)
    assert done.code == 0, done
    return run_dir, done


@pytest.fixture
def copied(finished: tuple[Path, Ended], tmp_path: Path) -> Path:
    """A copy of the finished run's folder."""
    return Path(shutil.copytree(finished[0], tmp_path / "run"))
