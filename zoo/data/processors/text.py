"""Processor of families that take text alone: a tokenizer with its chat template."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from zoo.config.locate import check_side_files, side_file_fault
from zoo.data.processors.answers import CHATML, ChatMarkers
from zoo.data.processors.processor import ArchConfig, Features, Processor
from zoo.data.tokenizer import ROOT
from zoo.errors import ConfigError, printable

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
        """The tokenizer's."""
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

        folder = ROOT if source is None else source
        try:
            check_side_files(folder)
            # Code that a folder brings along (auto_map) is never run, and nobody is asked whether it may be.
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except Exception as error:  # of many kinds, by what lies in the folder
            fault = None if isinstance(error, ConfigError) else side_file_fault(folder)
            said = printable(fault or " ".join(str(error).split()), 400)
            raise ConfigError(
                f"model.init: no tokenizer can be loaded from {Path(folder)}: {said}; its folder should hold the "
                "tokenizer's files and the chat template."
            ) from error
        return cls(TextOnly(tokenizer), markers)
