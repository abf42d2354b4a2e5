"""GRPO with zoo alone: a tiny model that reads some strips of digits learns to read more, by a reward for right answers.

It takes five minutes of one core. The answers are sampled by zoo's own generation, with the weights of the step before.
"""

import random

import torch
from torch import Tensor

import zoo
from zoo.data.sources.rows import Row, read_rows

STEPS, ASKED, SAMPLES = 80, 32, 8  # updates; rows of each, and answers to a row
FOLDER = "runs/grpo"


def strips(split: str) -> list[Row]:
    """Pictures of up to three handwritten digits."""
    rows = read_rows(f"digits:{split}")
    return [row for row in rows if row.kind == "image" and len(row.messages[-1].content) <= 3]


def right(answers: list[dict]) -> Tensor:
    """(B,) 1 for each answer that is exactly the row's own: the reward."""
    return torch.tensor([float(one["text"] == one["reference"]) for one in answers])


def loss_fn(logprobs: Tensor, batch: dict) -> Tensor:
    """PPO's clipped loss, summed over the answers' tokens."""
    ratio = (logprobs - batch["old_logprobs"]).exp()
    clipped = ratio.clamp(0.8, 1.2)
    loss = -torch.minimum(ratio * batch["advantages"], clipped * batch["advantages"])
    return loss[batch["loss_mask"]].sum()


def half_trained(folder: str) -> None:
    """Train a tiny Qwen3-Omni on strips of one to six digits, from random weights, for 40 steps."""
    parts = {"train": "train", "eval": "heldout"}
    data = [f"data.{part}=[{{path: digits:{split}, kinds: [image]}}]" for part, split in parts.items()]
    steps = ["nproc=1", "hardware=cpu", "train.steps=40", "train.warmup_steps=10", f"run.dir={folder}"]
    zoo.train(zoo.load_recipe("demo", [*data, *steps]))


def reinforce(folder: str) -> None:
    """Update the weights by the rewards of sampled answers, and print what held-out strips show of it."""
    schedule = ["train.lr=5e-4", "train.warmup_steps=5", "train.schedule=cosine", f"train.steps={STEPS}"]
    fixed = ["hardware=cpu", f"model.init={folder}", "packing.budget=4096"]
    recipe = zoo.load_recipe("qwen3_omni_sft", [*fixed, *schedule])
    train, held_out, dice = strips("train"), strips("heldout"), random.Random(0)
    options = {"max_new_tokens": 8, "batch": 256}
    with zoo.Engine.open(recipe) as engine:
        for step in range(STEPS + 1):
            if step % 20 == 0:
                greedy = right(engine.generate(held_out, temperature=0.0, **options).answers).mean()
                drawn = right(engine.generate(held_out, samples=8, seed=STEPS, **options).answers).mean()
                print(f"step {step}: held-out strips {greedy:.1%} right, sampled {drawn:.1%}", flush=True)
            if step == STEPS:
                break
            found = engine.generate(dice.sample(train, ASKED), samples=SAMPLES, seed=step, **options)
            rewards = right(found.answers).view(ASKED, SAMPLES)
            advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
            batch = found.batch
            batch["advantages"] = advantages.view(-1, 1).expand(batch["input_ids"].shape)
            batch["old_logprobs"] = engine.logprobs(batch).cpu()
            engine.train_step(batch, loss_fn)
        engine.save(f"{FOLDER}/reinforced", STEPS)


if __name__ == "__main__":
    half_trained(f"{FOLDER}/half")
    reinforce(f"{FOLDER}/half")
