"""The processor: a tokenizer with a chat template."""

from typing import ClassVar

from transformers import AutoTokenizer

from zoo.data.processors.processor import ChatMarkers, Processor
from zoo.data.tokenizer import ROOT

MARKERS = ChatMarkers(header="<|im_start|>assistant\n", end="<|im_end|>")


class ToyProcessor(Processor):
    """Text alone; no token ids of media to give to the config."""

    modalities = ("text",)
    token_ids: ClassVar[dict[str, int]] = {}


class TextOnly:
    """A tokenizer, called as processors of transformers are."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer, self.chat_template = tokenizer, tokenizer.chat_template
        self.apply_chat_template = tokenizer.apply_chat_template
        self.save_pretrained = tokenizer.save_pretrained

    def __call__(self, text, return_tensors):
        return self.tokenizer(text, return_tensors=return_tensors)


def build_processor(arch_config, source=None) -> ToyProcessor:
    """Of a checkpoint folder, or of the tokenizer that comes with zoo."""
    return ToyProcessor(TextOnly(AutoTokenizer.from_pretrained(source or ROOT)), MARKERS)
