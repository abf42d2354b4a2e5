"""What a rank reads from a file must be what all ranks have read: two ranks whose files differ, as on a stale network folder."""

import os
import sys
import textwrap
from pathlib import Path

import pytest

from zoo.launch.rank_group import run_ranks

HEAD = """
import os, sys
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank, folder = dist.get_rank(), Path(sys.argv[1])
"""


# PyTorch now and then aborts in the tear-down of gloo when a process ends beside busy others; what is asked here is over.
END = """
dist.barrier()
os._exit(0)
"""


def ranks(text: str, folder: Path) -> int:
    return run_ranks([sys.executable, "-c", HEAD + textwrap.dedent(text) + END, str(folder)], 2, threads=1)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.slow
def test_the_first_rank_s_view_is_everybody_s(tmp_path: Path) -> None:
    text = """
        from types import SimpleNamespace
        from zoo.checkpoint.selection import choose
        from zoo.config.locate import checkpoints
        from zoo.config.resume import refuse_unwanted
        from zoo.logging.result import was_completed
        from zoo.parallel.object_group import agreed
        mine = folder / str(rank)  # each rank sees a folder of its own
        mine.mkdir()
        if rank == 0:
            (mine / "summary.json").write_text('{"steps": 4}')
        recipe = SimpleNamespace(run=SimpleNamespace(resume=True))
        def chosen():
            refuse_unwanted(mine, agreed(lambda: checkpoints(mine)), recipe)
            return choose(mine, None).folder
        assert agreed(lambda: was_completed(mine, 4, export=False)) and was_completed(mine, 4, export=False) == (rank == 0)
        if rank == 1:
            (mine / "checkpoints" / "iter_2").mkdir(parents=True)
            (mine / "checkpoints" / "iter_2" / "state.json").write_text("{}")
        assert chosen() is None
        recipe.run.resume = False
        assert chosen() is None
        try:
            agreed(lambda: (folder / ("no" if rank == 0 else ".")).stat())
        except FileNotFoundError:
            (folder / f"raised{rank}").touch()
    """
    assert ranks(text, tmp_path) == 0
    assert (tmp_path / "raised0").exists() and (tmp_path / "raised1").exists()


@pytest.mark.slow
def test_the_newest_checkpoint_to_start_from_is_the_first_rank_s(tmp_path: Path) -> None:
    """`model.init` is a run that trains on: a rank that looks later would take a newer one."""
    text = """
        from zoo.model import build
        init = folder / str(rank)
        for step in range(1, 2 + rank):
            (init / "checkpoints" / f"iter_{step}").mkdir(parents=True)
            (init / "checkpoints" / f"iter_{step}" / "state.json").write_text("{}")
        from zoo.config.locate import look
        from zoo.parallel.object_group import agreed
        seen = []
        family = type("Family", (), {"load": lambda self, part: self, "from_folder": lambda self, f: seen.append(f) or self,
                                     "hf": None, "__call__": lambda self, *a: self, "set_template": lambda self, t: None,
                                     "allow_special_tokens": lambda self, t: None})()
        build.get_family = lambda name: family
        build.with_rows_for_all = lambda config, processor, source, recipe: (config, source)
        from zoo.config.schema import ModelConfig, Recipe
        found = build.assemble(Recipe(model=ModelConfig(family="x", init=str(init))))
        assert found.source.folder == folder / "0" / "checkpoints" / "iter_1", found.source
    """
    assert ranks(text, tmp_path) == 0


@pytest.mark.slow
def test_ranks_with_different_recipes_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = """
        from zoo.config.schema import Recipe, TrainConfig
        from zoo.parallel.object_group import refuse_different
        from zoo.errors import UserError
        refuse_different(Recipe(nproc=rank))
        try:
            refuse_different(Recipe(train=TrainConfig(lr=0.1 + rank)))
        except UserError as error:
            (folder / str(rank)).write_text(str(error))
    """
    assert ranks(text, tmp_path) == 0, capfd.readouterr()
    said = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert said[0] == said[1] and said[0].startswith("train.lr: rank 0 has 0.1 and rank 1 has 1.1; ")
    assert os.listdir(tmp_path)


@pytest.mark.slow
def test_values_are_merged_over_blocks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Five ranks in blocks of three and two: each gets the values in their order, and the first merges blocks alone."""
    text = """
        from zoo.parallel.object_group import ObjectGroup
        group, merged = ObjectGroup(), []
        def joined(texts):
            merged.append(len(texts))
            return "".join(texts)
        for _ in range(2):
            assert group.merge(str(rank), joined) == "01234"
        assert merged == {0: [3, 2] * 2, 3: [2] * 2}.get(rank, []), merged
    """
    command = [sys.executable, "-c", HEAD + textwrap.dedent(text) + END, str(tmp_path)]
    assert run_ranks(command, 5, threads=1) == 0, capfd.readouterr()
