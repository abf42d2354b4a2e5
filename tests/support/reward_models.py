"""A reward model of transformers, and the scores that it gives to answers in zoo and by itself."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

QUESTIONS = {"what is it?": ["a cat", "7 digits: 123"], "and then?": ["", "nothing more than this, for the time being"]}


def write_classifier(language_model: Path, folder: Path) -> Path:
    """A ForSequenceClassification of the same body and tokenizer, with a head of its own."""
    import torch
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(language_model, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    for file in language_model.iterdir():
        if not (folder / file.name).exists() and file.suffix not in (".safetensors", ".bin"):
            shutil.copy(file, folder / file.name)
    return folder


def hf_scores(folder: Path) -> list[float]:
    """What transformers gives to each answer, as the chat template writes it, one after the other."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scores = []
    for question, answers in QUESTIONS.items():
        for answer in answers:
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            text = tokenizer.apply_chat_template(turns, tokenize=False)
            ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
            with torch.no_grad():
                scores.append(float(model.score(model.model(ids).last_hidden_state)[0, -1, 0]))
    return scores


def zoo_scores(rank: int, size: int, recipe: str, overrides: tuple[str, ...]) -> list[float]:
    """What `rl.reward_model` gives to them; data-parallel ranks share the questions out."""
    from support.recipes import load_effective
    from zoo.config.validate import validate
    from zoo.data.sources.rows import Message, Row
    from zoo.generation.prompts import make_prompt
    from zoo.model import build
    from zoo.parallel.object_group import object_group
    from zoo.parallel.world import open_world
    from zoo.rollouts.engine import Rollout, RolloutPrompt
    from zoo.rollouts.rewards.model import RewardModel
    from zoo.training.evaluation import token_logprobs

    made = load_effective(recipe, ["task=grpo", "hardware=cpu", "engine.threads=1", *overrides])
    with open_world(made) as world:
        made = validate(made, world.size)
        assembly = build.assemble(made)
        group = object_group()
        model = RewardModel(made, assembly, world, group, token_logprobs)
        rollouts: list[Any] = []
        for number, (question, answers) in enumerate(QUESTIONS.items()):
            row = Row(messages=(Message("user", question),))
            prompt = RolloutPrompt(number, row, make_prompt(assembly.processor, row, made.data, most=10**6).sample)
            for place, answer in enumerate(answers):
                ids = assembly.processor.tokenizer(answer, add_special_tokens=False)["input_ids"]
                finished = place == 0  # the other one was cut
                tokens = (*ids, 3) if finished else tuple(ids)  # whatever token it ended with
                rollouts.append(Rollout(prompt, place, tokens, (0.0,) * len(tokens), finished, answer))
        local = [one for one in rollouts if one.prompt.number % world.dp_size == world.dp_rank]
        scores = {(one.prompt.number, one.number): score for one, score in zip(local, model(local), strict=True)}
        everyone = {key: score for of_rank in group.gather(scores) for key, score in of_rank.items()}
        return [everyone[one.prompt.number, one.number] for one in rollouts]
