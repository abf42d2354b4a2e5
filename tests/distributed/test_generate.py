"""Answers are the same under every parallel layout, and from a run with adapters, an export and a checkpoint."""

import json
from functools import partial
from pathlib import Path

import pytest
from PIL import Image
from support import rank_tasks
from support.pool import Pool

OPTIONS = {"max_rows": 5, "max_new_tokens": 6, "batch": 3}
TRAIN = (
    "train.steps=2", "train.global_batch=2", "train.warmup_steps=0", "data.eval=none", "data.lookahead=4",
    "packing.budget=512", "log.tensorboard=false", "log.predictions=0",
)  # fmt: skip


@pytest.mark.slow(minutes=8)
def test_every_layout_and_every_kind_of_folder_gives_the_same_answers(pool: Pool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    pool.run(1, rank_tasks.train, [*TRAIN, f"run.dir={run}"], "qwen3_omni_sft", timeout=300.0)

    def answers(folder: Path, ranks: int, *overrides: str, **options: object) -> list[dict]:
        call = partial(rank_tasks.call, **{**OPTIONS, **options})
        found = pool.run(ranks, call, "generate", str(folder), "digits:heldout", list(overrides), timeout=300.0)
        assert all(one == found[0] for one in found)
        return found[0]

    wanted = answers(run, 1)
    assert len(wanted) == 5 and all(len(one["token_ids"]) == 6 or one["finish"] == "stop" for one in wanted)
    assert [one["reference"] for one in wanted] == [row["messages"][-1]["content"] for row in held_out()[:5]]
    assert answers(run / "export", 1, batch=1) == wanted
    for layout in ("tp", "ep", "pp", "cp"):
        assert answers(run / "checkpoints" / "iter_2", 2, f"parallel.{layout}=2") == wanted, layout
    assert answers(run, 2) == wanted, "over data-parallel ranks"
    drawn = {"temperature": 1.0, "seed": 3}
    assert answers(run, 2, "parallel.tp=2", **drawn) == answers(run, 1, **drawn, batch=2) != wanted


def held_out() -> list[dict]:
    import zoo.data.digits

    lines = (Path(zoo.data.digits.__file__).parent / "heldout.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow(minutes=4)
def test_prompts_adapters_and_mistakes(pool: Pool, tmp_path: Path) -> None:
    run, picture = tmp_path / "adapted", tmp_path / "a.png"
    Image.new("RGB", (64, 32), "red").save(picture)
    (tmp_path / "broken.png").write_bytes(b"no picture")
    base = tmp_path / "base"
    pool.run(1, rank_tasks.train, [*TRAIN, f"run.dir={base}"], "qwen3_omni_sft", timeout=300.0)
    adapted = [*TRAIN, "lora.rank=4", "train.lr=0.3", f"model.init={base / 'export'}", f"run.dir={run}"]
    pool.run(1, rank_tasks.train, adapted, "qwen3_omni_sft", timeout=300.0)

    def ask(folder: Path, prompt: str = "Read.", image: Path = picture) -> list[dict]:
        call = partial(rank_tasks.call, prompt=prompt, image=str(image), max_new_tokens=5)
        (found,) = pool.run(1, call, "generate", str(folder), timeout=300.0)
        return found

    (answer,) = ask(run)
    assert answer["reference"] is None and answer["prompt_tokens"] > 5
    assert answer["token_ids"] != ask(base)[0]["token_ids"], "the adapters take part"
    with pytest.raises(Exception, match=r"broken\.png"):
        ask(run, image=tmp_path / "broken.png")
    with pytest.raises(Exception, match="max_position_embeddings"):
        ask(run, prompt="1 2 3 " * 60_000)
