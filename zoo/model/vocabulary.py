"""Ids of a folder's tokenizer that have no row in its embedding: refused before anything is read, or given rows."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from zoo.config.locate import Place
from zoo.config.schema import Recipe
from zoo.errors import UserError, printable
from zoo.nn.family import FamilyConfig, vocabulary_rows

if TYPE_CHECKING:
    from zoo.data.processors.processor import Processor


def with_rows_for_all(
    config: FamilyConfig, processor: Processor, source: Place, recipe: Recipe
) -> tuple[FamilyConfig, Place]:
    """The config and the source of weights, with a row for every token that a sample may hold.

    Raises:
        UserError: the embedding lacks some, and `model.resize_embeddings` is false, or the source is a run's checkpoint.
    """
    rows = config.text.vocab_size
    beyond = ids_beyond(processor, rows, recipe.data.special_tokens)
    if not beyond:
        return config, source
    needed = vocabulary_rows(processor.tokenizer)
    if recipe.model.resize_embeddings and source.kind != "run":
        return config.with_vocabulary(needed), replace(source, grown_from=rows)
    names = ", ".join(printable(repr(text), 60) for text in list(beyond)[:3])
    more = f" and {len(beyond) - 3} more" if len(beyond) > 3 else ""
    fix = "give the tokenizer that belongs to the weights, or model.resize_embeddings=true, which adds rows that a run trains"
    if source.kind == "run":
        fix = "put its own tokenizer back; for another one, start from the folder that `zoo convert` makes of the run"
    raise UserError(
        f"{source.files}: the tokenizer has ids up to {needed - 1} ({names}{more}), the embedding has {rows} rows "
        f"({config.text_prefix}vocab_size); {fix}"
    )


def ids_beyond(processor: Processor, rows: int, allowed: Collection[str] = ()) -> dict[str, int]:
    """Tokens that a sample may hold and whose ids are `rows` or more, by id.

    A special token that neither the chat template nor the family writes, and that is not among those `allowed` in rows, is in no
    sample: rows that hold one are refused. Gemma 3 of text alone has the images' one, without a row.
    """
    tokenizer = processor.tokenizer
    beyond = {text: number for text, number in tokenizer.get_vocab().items() if number >= rows}
    if not beyond:
        return {}
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    template = str(getattr(processor.hf, "chat_template", None) or "")
    written = {processor.pad_id, *processor.ends.values(), tokenizer.eos_token_id, tokenizer.bos_token_id}
    written |= {*getattr(processor, "token_ids", {}).values(), *processor.media_ids}
    possible = {
        text: number
        for text, number in beyond.items()
        if text not in special or text in template or text in allowed or number in written
    }
    return dict(sorted(possible.items(), key=lambda pair: pair[1]))
