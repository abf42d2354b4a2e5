"""Greedy answers of a tiny model of each family, in zoo and in transformers.

Prompts are of different lengths and hold images, videos and sound. transformers answers each by itself.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from support.engine import Zoo
from support.families import FAMILIES
from support.rows import Example
from support.tiny import load_thinker
from zoo.data.sample import IGNORE
from zoo.generation.decoding import Decoding
from zoo.generation.sampling import Sampling

TOKENS = 10


@dataclass(frozen=True)
class Asked:
    """A model in transformers and in zoo, and prompts."""

    hf: Any
    zoo: Zoo
    examples: dict[str, Example]

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens before the last answer of each row."""
        found = []
        for example in self.examples.values():
            labels = example.sample.labels.tolist()
            last = max(i for i, label in enumerate(labels) if label != IGNORE)
            while last and labels[last - 1] != IGNORE:
                last -= 1
            found.append(last)
        return found

    @cached_property
    def samples(self) -> list[Any]:
        pairs = zip(self.examples.values(), self.lengths, strict=True)
        return [replace(e.sample, input_ids=e.sample.input_ids[:n], labels=e.sample.labels[:n]) for e, n in pairs]

    def wanted(self, ends: frozenset[int] = frozenset()) -> list[list[int]]:
        """What transformers generates."""
        return [self._wanted(e, n, ends) for e, n in zip(self.examples.values(), self.lengths, strict=True)]

    @torch.no_grad()
    def _wanted(self, example: Example, length: int, ends: frozenset[int]) -> list[int]:
        whole = example.sample.length
        features = {
            name: x[:, :length] if isinstance(x, torch.Tensor) and x.shape[:2] == (1, whole) else x
            for name, x in example.features.items()
        }
        device = next(self.hf.parameters()).device
        out = self.hf.generate(
            **{name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in features.items()},
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=sorted(ends) or [10**6],
            pad_token_id=0,
        )
        return out[0, length:].tolist()

    @torch.no_grad()
    def wanted_logprobs(self, number: int, tokens: list[int], temperature: float) -> torch.Tensor:
        """transformers' log-probability of each token of an answer to a prompt, in one pass."""
        example, length = list(self.examples.values())[number], self.lengths[number]
        further = {"input_ids": torch.tensor([tokens]), "attention_mask": torch.ones(1, len(tokens), dtype=torch.int64)}
        features = {}
        for name, x in example.features.items():
            if isinstance(x, torch.Tensor) and x.shape[:2] == (1, example.sample.length):
                x = torch.cat([x[:, :length], further.get(name, x.new_zeros(1, len(tokens)))], dim=1)
            features[name] = x
        logits = self.hf(**features).logits[0, length - 1 : -1].float() / temperature
        return logits.log_softmax(-1).gather(1, further["input_ids"].T)[:, 0]

    def drawn(self, temperature: float, copies: int, **options: Any) -> Any:
        """Answers drawn at random, several to each prompt."""
        zoo, sampling = self.zoo, Sampling(TOKENS, temperature, top_p=0.9, seed=3)
        made = Decoding(zoo.assembly, [zoo.model.eval()], zoo.recipe, zoo.world, sampling, frozenset(), **options)
        return made.answers(self.samples, range(copies * len(self.samples)), copies)

    def found(self, ends: frozenset[int] = frozenset(), cached: bool = True, **overrides: Any) -> list[list[int]]:
        zoo = self.zoo
        recipe = zoo.recipe.replace({key.replace("__", "."): value for key, value in overrides.items()})
        made = Decoding(zoo.assembly, [zoo.model.eval()], recipe, zoo.world, Sampling(TOKENS), ends, cached)
        return made.answer(self.samples, range(len(self.samples)))


# transformers' `generate` begins an answer behind the largest position of a prompt, also where its text has not come as far
# as the last frame of a video.
SLOW_CLOCK = {"vision": {"tokens_per_second": 1}}
SIZES = {"qwen25_vl": SLOW_CLOCK, "qwen35_text experts": {"mtp": 1}, "qwen3_next": {"mtp": 1}}
ASKED = [
    "qwen35_vl",
    *(
        name
        for name in FAMILIES
        if name not in ("qwen35_vl", "llava_next", "internvl experts", "internvl qwen2", "qwen3")
    ),
]


def ask(name: str, folder: Path, world: Any) -> Asked:
    """A family's model, and its rows."""
    family = FAMILIES[name]
    written = family.write(folder, **SIZES.get(name, {}))
    zoo = Zoo.load(written, world, f"model.family={family.name}")
    return Asked(load_thinker(written), zoo, family.examples(zoo.assembly.processor))
