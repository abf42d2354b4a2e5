"""Processor of families that take text alone: a tokenizer with its chat template."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar

from zoo.config.locate import load_from_folder
from zoo.data.processors.answers import CHATML, ChatMarkers
from zoo.data.processors.processor import ArchConfig, Features, Processor
from zoo.data.tokenizer import ROOT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextOnly:
    """A tokenizer, called as transformers' processors are."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.apply_chat_template = tokenizer.apply_chat_template
        self.save_pretrained = tokenizer.save_pretrained

    @property
    def chat_template(self) -> str | None:
        """The chat template of the tokenizer."""
        template: str | None = self.tokenizer.chat_template
        return template

    def __call__(self, text: str, return_tensors: str) -> Features:
        return self.tokenizer([text], return_tensors=return_tensors)


class TextProcessor(Processor):
    """`Processor` around a tokenizer."""

    modalities = ("text",)
    token_ids: ClassVar[dict[str, int]] = {}  # of placeholders in a config: there are none

    @classmethod
    def build(cls, arch_config: ArchConfig, source: str | None = None, markers: ChatMarkers = CHATML) -> TextProcessor:
        """The processor of a run.

        Args:
            arch_config: the architecture, of which it needs nothing.
            source: a Hugging Face folder with the tokenizer's files; None takes the bundled tokenizer.
            markers: how the chat template writes an assistant's turn.

        Raises:
            ConfigError: no tokenizer in `source`.
            UserError: a tokenizer or template of other markers.
        """
        from transformers import AutoTokenizer

        folder, files = ROOT if source is None else source, "the tokenizer's files and the chat template"
        # Code that a folder brings along (auto_map) is never run, and nobody is asked whether it may be.
        load = partial(AutoTokenizer.from_pretrained, folder, trust_remote_code=False)
        return cls(TextOnly(load_from_folder(folder, "tokenizer", files, load)), markers)
