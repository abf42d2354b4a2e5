"""The pool of ranks, a tiny Qwen3-Omni that every parallel size divides, and rows in micro-batches."""

import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import rank_tasks
from support.engine import Batch
from support.matrix import replace_table, table
from support.pool import Pool
from support.rows import make_examples
from support.tiny_omni import thinker_config, write_tiny_omni

# 4 layers for 2 stages of 2 chunks; 6 experts for 2 expert-parallel ranks.
TEXT = {"num_hidden_layers": 4, "mlp_only_layers": [1], "num_experts": 6}


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four ranks, started when first asked to run."""
    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture
def call(pool: Pool) -> Callable[..., Any]:
    """A function of zoo's on so many ranks; the first one's answer."""

    def run(name: str, *arguments: Any, ranks: int = 1, **options: Any) -> Any:
        plain = [str(one) if isinstance(one, Path) else one for one in arguments]
        return pool.run(ranks, partial(rank_tasks.call, **options), name, *plain, timeout=300.0)[0]

    return run


MEASURED = pytest.StashKey[dict[tuple[str, str], float]]()
PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-table", action="store_true", help="write what the matrix measures to docs/parallelism.md")
    parser.addoption("--write-golden", action="store_true", help="write the losses of tests/golden anew")


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> dict[tuple[str, str], float]:
    """(parallel layout, model) -> worst gradient error, of the matrix in this session."""
    return request.config.stash.setdefault(MEASURED, {})


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if session.config.getoption("--write-table") and exitstatus == 0:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(replace_table(page, table(session.config.stash[MEASURED])), encoding="utf-8")


@pytest.fixture(scope="session")
def even_omni(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny thinker with the sizes of TEXT."""
    return write_tiny_omni(tmp_path_factory.mktemp("even_omni"), whole=False, **TEXT).thinker


@pytest.fixture(scope="session")
def tied_omni(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, with embedding and head in one weight."""
    return write_tiny_omni(tmp_path_factory.mktemp("tied_omni"), whole=False, tied=True, **TEXT).thinker


@pytest.fixture(scope="session")
def samples() -> dict[str, Any]:
    """Samples of rows of every kind and mixtures."""
    from zoo.models.qwen3_omni.processor import build_processor

    examples = make_examples(build_processor(thinker_config(**TEXT)))
    return {name: example.sample for name, example in examples.items()}


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[Batch]], str]:
    """Writes micro-batches where ranks can read them, and says where."""
    folder = tmp_path_factory.mktemp("batches")

    def write(batches: list[Batch]) -> str:
        path = folder / f"{len(list(folder.iterdir()))}.pickle"
        path.write_bytes(pickle.dumps(batches))
        return str(path)

    return write
