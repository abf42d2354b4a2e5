"""Greedy answers of a tiny model of each family, in zoo and in transformers.

Prompts are of different lengths and hold images, videos and sound. transformers answers each by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from support.engine import Zoo
from support.rows import Example, make_examples
from support.sound_rows import sound_examples
from support.text_rows import text_examples
from support.tile_rows import tile_examples
from support.tiny import load_plain
from support.tiny_gemma3 import write_tiny_gemma3, write_tiny_gemma3_text
from support.tiny_gemma4 import write_tiny_gemma4
from support.tiny_glm45v import write_tiny_glm45v
from support.tiny_internvl import write_tiny_internvl
from support.tiny_llava import write_tiny_llava
from support.tiny_omni import load_thinker, write_tiny_omni
from support.tiny_qwen3 import write_tiny_qwen3
from support.tiny_qwen3_asr import write_tiny_qwen3_asr
from support.tiny_qwen3_next import write_tiny_qwen3_next
from support.tiny_qwen3_vl import write_tiny_qwen3_vl
from support.tiny_qwen25_omni import write_tiny_qwen25_omni
from support.tiny_qwen25_vl import write_tiny_qwen25_vl
from support.tiny_qwen35 import write_tiny_qwen35
from support.vision_rows import vision_examples
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

    def found(self, ends: frozenset[int] = frozenset(), cached: bool = True, **overrides: Any) -> list[list[int]]:
        zoo = self.zoo
        recipe = zoo.recipe.replace({key.replace("__", "."): value for key, value in overrides.items()})
        made = Decoding(zoo.assembly, [zoo.model.eval()], recipe, zoo.world, Sampling(TOKENS), ends, cached)
        return made.answer(self.samples, range(len(self.samples)))


def omni(folder: Path, world: Any) -> Asked:
    made = write_tiny_omni(folder)
    zoo = Zoo.load(made.thinker, world)
    return Asked(load_thinker(made.thinker), zoo, make_examples(zoo.assembly.processor))


def other(write: Callable[[Path], Path], family: str, examples: Any, folder: Path, world: Any) -> Asked:
    write(folder)
    zoo = Zoo.load(folder, world, f"model.family={family}")
    return Asked(load_plain(folder), zoo, examples(zoo.assembly.processor))


# transformers' `generate` begins an answer behind the largest position of a prompt, also where its text has not come as far
# as the last frame of a video.
SLOW_CLOCK = {"tokens_per_second": 1}
FAMILIES: dict[str, Callable[[Path, Any], Asked]] = {
    "qwen35_vl": partial(other, write_tiny_qwen35, "qwen35_vl", vision_examples),
    "qwen3_omni": omni,
    "qwen3_vl": partial(other, write_tiny_qwen3_vl, "qwen3_vl", vision_examples),
    "qwen3_vl moe": partial(other, partial(write_tiny_qwen3_vl, moe=True), "qwen3_vl", vision_examples),
    "qwen35_vl moe": partial(other, partial(write_tiny_qwen35, moe=True), "qwen35_vl", vision_examples),
    "gemma3": partial(other, write_tiny_gemma3, "gemma3", tile_examples),
    "gemma3_text": partial(other, write_tiny_gemma3_text, "gemma3_text", text_examples),
    "gemma4": partial(other, write_tiny_gemma4, "gemma4", tile_examples),
    "llava": partial(other, partial(write_tiny_llava, kind="llava"), "llava", tile_examples),
    "llava_onevision": partial(other, partial(write_tiny_llava, kind="llava_onevision"), "llava", tile_examples),
    "qwen3_asr": partial(other, write_tiny_qwen3_asr, "qwen3_asr", sound_examples),
    "qwen25_omni": partial(other, write_tiny_qwen25_omni, "qwen25_omni", make_examples),
    "qwen3 moe": partial(other, partial(write_tiny_qwen3, moe=True), "qwen3", text_examples),
    "qwen3_next": partial(other, partial(write_tiny_qwen3_next, mtp=1), "qwen3_next", text_examples),
    "internvl": partial(other, write_tiny_internvl, "internvl", tile_examples),
    "qwen25_vl": partial(other, partial(write_tiny_qwen25_vl, vision=SLOW_CLOCK), "qwen25_vl", vision_examples),
    "glm45v": partial(other, write_tiny_glm45v, "glm45v", vision_examples),
}
