"""From a recipe to this rank's model chunks and their step."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from zoo.bridge import Dims
from zoo.bridge.files.side_files import GENERATION, write_generation_config
from zoo.bridge.load import Patterns, fitting_names, stored_in_fp32
from zoo.bridge.parallel import default_comm, model_parameters, together
from zoo.config.checks.engine import uses_transformer_engine
from zoo.config.locate import Place, locate, look, read_origin
from zoo.config.schema import Recipe
from zoo.config.validate import validate
from zoo.errors import UserError, printable
from zoo.model.frozen_base import hold_as_loaded, is_quantised_as_loaded, without_matrices
from zoo.model.objective import objective_of
from zoo.model.run_settings import NONE, RunSettings, settings_of_recipe
from zoo.model.served_processor import ServedProcessor
from zoo.nn.family import FamilyConfig, vocabulary_rows
from zoo.nn.flops import model_cost
from zoo.nn.fp32 import hold_in_fp32
from zoo.nn.inputs import Stage
from zoo.parallel.megatron.replaced import replaced
from zoo.parallel.object_group import agreed
from zoo.parallel.world import World, seed_everything
from zoo.registry import ModelFamily, get_family
from zoo.steps import StepRank

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

    from zoo.data.processors.processor import Processor
    from zoo.steps.packed_step import PackedStep
    from zoo.types import JsonMapping, JsonObject


@dataclass(frozen=True)
class Assembly:
    """A recipe's model before any weight: family, config, processor, and the source of the weights."""

    family: ModelFamily
    config: FamilyConfig
    _processor: Processor | None  # None for a model of which only shapes are needed
    source: Place | None  # where the weights lie; None for random ones
    settings: RunSettings = NONE  # how the run reads its rows

    @property
    def processor(self) -> Processor:
        """Turns rows into samples; AttributeError for an `assembly_of_arch`."""
        if self._processor is None:
            raise AttributeError("an assembly of an architecture alone has no processor")
        return self._processor

    @property
    def served(self) -> ServedProcessor:
        """What an export carries of the processor: it reads rows as the run does."""
        return ServedProcessor(self.processor, self.settings, self.config.text.hidden_size)

    @cached_property
    def fp32(self) -> Patterns:
        """Patterns of parameters that a model in half precision holds in fp32: as the weights have them, or as the family publishes them."""
        bridge, source = self.family.load("bridge"), self.source
        if source is None:
            return tuple(bridge.fp32)
        if source.kind == "run":
            return tuple(read_origin(source.folder).get("fp32", ()))
        return stored_in_fp32(bridge, source.weights, native=source.kind == "zoo", tied=bool(self.config.tied))

    def save_files(self, folder: Path) -> None:
        """Write config.json, the processor's files, generation_config.json and what the family carries beside weights."""
        self.processor.save(folder)
        (folder / "config.json").write_text(self.config.hf.to_json_string(), encoding="utf-8")
        if self.source is not None:
            for name in (GENERATION, *self.family.load("bridge").carry_files):
                if (self.source.files / name).is_file():
                    shutil.copyfile(self.source.files / name, folder / name)
        write_generation_config(folder, self.config.hf.to_dict(), list(self.processor.ends.values()))


def find_source(recipe: Recipe) -> Place | None:
    """Where the weights of `model.init` lie; None for random ones. Every rank calls it.

    Raises:
        UserError: `model.init` names nothing that holds weights.
    """
    init = recipe.model.init
    if init == "random":
        return None
    # A run that still trains gets further checkpoints: the first rank decides which is the newest.
    return agreed(lambda: look(init)) or locate(init, key="model.init")


def assemble(recipe: Recipe, source: Place | None = None) -> Assembly:
    """Resolve family, architecture and processor. Every rank calls it.

    Args:
        source: what `find_source` gave, if it was called before; a run's damaged files can be repaired in between
            (`zoo.checkpoint.selection.repaired_source`).

    Raises:
        UserError: the family, the weights or the architecture is missing, data.template or data.special_tokens
            names what the chat template or the tokenizer doesn't know, or the tokenizer has ids without a row in the embedding.
    """
    family = get_family(recipe.model.family)
    config_class, build_processor = family.load("config"), family.load("processor")
    source = source or find_source(recipe)
    if source is not None:
        config = config_class.from_folder(source.files)
        processor = build_processor(config.hf, str(source.files))
    elif recipe.model.arch:
        config = config_class.from_arch(recipe.model.arch)
        processor = build_processor(config.hf, None)
    else:
        raise UserError("model.init=random needs an architecture: give size=... or model.init=<folder>")
    processor.set_template(recipe.data.template)
    processor.allow_special_tokens(recipe.data.special_tokens)
    if recipe.train.speech_loss:
        processor.train_speech(recipe.data.codec)
    if source is not None:
        config, source = with_rows_for_all(config, processor, source, recipe)
    else:
        config = config.for_processor(processor)
    return Assembly(family, config, processor, source, settings_of_recipe(recipe))


def assembly_of_arch(recipe: Recipe) -> Assembly:
    """An assembly of `model.arch` alone, without processor and weights: for models of which only shapes are needed."""
    family = get_family(recipe.model.family)
    return Assembly(family, family.load("config").from_arch(recipe.model.arch), None, None)


type Draw = Callable[[Callable[..., Tensor], Tensor, Sequence[object], JsonMapping], Tensor]
"""Takes a function of PyTorch that draws, the tensor it writes to, and its further arguments; returns the tensor."""


class _Draws(TorchFunctionMode):
    """Has `draw` give tensors their random values while a model is built; on a CPU that takes minutes for billions of weights."""

    # By name: PyTorch has each of them as a function and as a method, transformers wraps the functions.
    names = frozenset(f"{name}_" for name in (
        "normal", "trunc_normal", "uniform", "kaiming_normal", "kaiming_uniform", "xavier_normal", "xavier_uniform"
    ))  # fmt: skip

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.draw = draw

    def __torch_function__(
        self,
        func: Callable[..., Tensor],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: JsonMapping | None = None,
    ) -> Tensor:
        kwargs = dict(kwargs or {})
        if getattr(func, "__name__", None) not in self.names:
            return func(*args, **kwargs)
        tensor, *args = args or (kwargs.pop("tensor"),)
        assert isinstance(tensor, Tensor)
        return self.draw(func, tensor, args, kwargs)


@contextmanager
def nothing_drawn() -> Iterator[None]:
    """Inside the block tensors keep what their memory held, where random values are wanted of them."""
    # From torch 2.14 on trunc_normal_ draws again until all values lie between its bounds, which what is not drawn may never do.
    with (
        replaced(torch.nn.init, _no_grad_trunc_normal_=lambda tensor, *args, **kwargs: tensor),
        _Draws(lambda func, tensor, args, kwargs: tensor),
    ):
        yield


def drawn_on(device: torch.device, seed: int) -> Draw:
    """Draws values for tensors of the CPU on another device: those of towers, which transformers builds on the CPU.

    The random numbers come from a generator of its own, so ranks draw the same ones whatever else they drew.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def draw(func: Callable[..., Tensor], tensor: Tensor, args: Sequence[object], kwargs: JsonMapping) -> Tensor:
        if tensor.device.type != "cpu" or kwargs.get("generator") is not None:
            return func(tensor, *args, **kwargs)
        on_device = torch.empty_like(tensor, device=device)
        with torch.no_grad():
            tensor.copy_(func(on_device, *args, **{**kwargs, "generator": generator}))
        return tensor

    return draw


def build_model(
    assembly: Assembly, recipe: Recipe, world: World, *, loaded: bool = False, adapts: bool = False
) -> list[MegatronModule]:
    """This rank's model chunks (several with an interleaved pipeline), with random weights.

    Weights are not drawn where they are loaded afterwards: from the assembly's source, or with `loaded` from a checkpoint.
    `adapts`: adapters will be put beside the source's weights, which are held in `lora.base_dtype` as they are loaded, where they can be.
    """
    from megatron.core.transformer.module import Float16Module

    chunks: list[MegatronModule] = []
    held = adapts and is_quantised_as_loaded(recipe, assembly.source)
    for index in range(recipe.parallel.vpp):
        seed_everything(recipe.run.seed)  # towers get the same weights on every rank
        stage = Stage(
            first=world.pp_rank == 0 and index == 0,
            last=world.pp_rank == world.pp_size - 1 and index == recipe.parallel.vpp - 1,
            vp_stage=index if recipe.parallel.vpp > 1 else None,
        )
        drawing: AbstractContextManager[object] = nullcontext()
        if loaded or assembly.source is not None:
            drawing = nothing_drawn()
        elif world.device.type == "cuda":
            drawing = _Draws(drawn_on(world.device, recipe.run.seed))
        with drawing, without_matrices() if held else nullcontext():
            chunks.append(assembly.family.load("model")(assembly.config, recipe, stage).to(world.device))
    if held:
        hold_as_loaded(chunks, recipe, assembly.family)
    fp32 = together(default_comm(), lambda: assembly.fp32)
    if recipe.engine.precision != "bf16":
        return chunks
    chunks = [Float16Module(chunk.config, chunk) for chunk in chunks]
    parameters = dict(model_parameters(chunks))
    fp32_parameters = [(name, parameters[name]) for name in fitting_names(fp32, parameters)]
    if recipe.lora.base_dtype != "model":  # matrices become codes once they are loaded
        fp32_parameters = [
            (name, p) for name, p in fp32_parameters if p.ndim < 2 or not name.startswith("decoder.layers.")
        ]
    for chunk in chunks:
        hold_in_fp32(chunk, [parameter for _, parameter in fp32_parameters])
    return chunks


def build_step(assembly: Assembly, recipe: Recipe, world: World, *, encodes_media: bool = True) -> PackedStep:
    """The family's PackedStep for this rank; without `encodes_media`, what towers make of media is given to the model otherwise."""
    groups, flops = world.groups, None
    if not (recipe.parallel.cp == 1 or recipe.parallel.cp_split == "zigzag" or uses_transformer_engine(recipe)):
        # Context-parallel ranks may hold samples whole. Transformer Engine's attention wants chunks.
        flops = model_cost(assembly.config, recipe).decoder.flops
    rank = StepRank(
        world.device,
        cp_group=groups.cp if groups.cp.size() > 1 else None,
        media_group=groups.tp_cp if groups.tp_cp.size() > 1 and encodes_media else None,
        encodes_media=world.pp_rank == 0 and encodes_media,
    )
    step: PackedStep = assembly.family.load("step")(
        assembly.config,
        recipe.packing,
        rank,
        objective_of(assembly.config, recipe),
        flops=flops,
        vocabulary=assembly.config.text.vocab_size,
    )
    return step


OTHER_MODEL: JsonObject = {
    "model.arch": {},
    "model.resize_embeddings": False,
    "lora.rank": 0,
    "lora.init": None,
    "lora.merge_first": None,
    "parallel.stage_layers": [],
    "train.reference": "start",
    "distill.teacher": None,
}
"""Keys of a recipe that speak of its own model."""


def assemble_other(
    recipe: Recipe, key: str, tokens: int, world: World, changes: JsonMapping | None = None, *, larger: bool = False
) -> tuple[Recipe, Assembly]:
    """A second model of the recipe's family, with its weights: a reference, a teacher, or a reward model.

    Args:
        key: of the recipe, which names the weights.
        tokens: vocabulary of the model in training.
        changes: further keys of the second model's recipe.
        larger: whether its vocabulary may be larger.

    Raises:
        UserError: the key names no weights, or those of a model with another vocabulary.
    """
    init = attrgetter(key)(recipe)
    recipe = validate(recipe.replace(OTHER_MODEL | dict(changes or {}) | {"model.init": init}), world.size)
    assembly = assemble(recipe)
    size = assembly.config.text.vocab_size
    if size < tokens or (size > tokens and not larger):
        raise UserError(
            f"{key}={init}: a vocabulary of {size:,} tokens, and the model in training has {tokens:,}; wanted a model of the same tokens"
        )
    return recipe, assembly


def model_dims(assembly: Assembly) -> Dims:
    """The decoders' sizes, for the bridge."""
    dims, further = Dims.from_hf(assembly.config.text, tied=assembly.config.tied), assembly.config.further_decoders
    return replace(dims, parts={part: Dims.from_hf(text) for part, text in further.items()})


def freeze(chunks: Sequence[MegatronModule], recipe: Recipe, family: ModelFamily) -> None:
    """Stop training the parts of `model.freeze`: no gradient, no optimizer state."""
    for name, parameter in model_parameters(chunks):
        if family.part_of(name, recipe.named_parts) in recipe.model.freeze:
            parameter.requires_grad_(False)


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
