"""A server of `zoo` commands with small data, and one finished run that tests share."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import Ended, Zoo, bundled, text_row, write_rows

ENV_DROPPED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zoo]:
    folder = tmp_path_factory.mktemp("zoo")
    rows = [text_row(100 + 7 * n) for n in range(10)]
    rows[3:3] = [bundled("image")]
    write_rows(folder / "train.jsonl", rows)
    write_rows(folder / "heldout.jsonl", [text_row(11), bundled("image")])
    env = {name: value for name, value in os.environ.items() if name not in ENV_DROPPED}
    env.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).parents[1] / "support" / "warm_zoo.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    ) as server:
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
