"""Gemma 3's processor of text: a tokenizer of its own turns, or the bundled one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zoo.data.processors.answers import TURNS, ChatMarkers
from zoo.data.processors.text import TextProcessor

if TYPE_CHECKING:
    from transformers import ProcessorMixin


class Gemma3TextProcessor(TextProcessor):
    """`TextProcessor` with the markers that the tokenizer knows."""

    def __init__(self, hf: ProcessorMixin, markers: ChatMarkers) -> None:
        super().__init__(hf, TURNS if TURNS.end in hf.tokenizer.get_vocab() else markers)
