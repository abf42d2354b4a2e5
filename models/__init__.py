"""The model families: one folder each, imported as `zoo.models.<family>`."""

from zoo.registry import ModelFamily


def family(
    package: str,
    prefix: str,
    title: str,
    modalities: str,
    parts: str,
    *,
    experts: bool = False,
    model: str = "",
    step: str = "",
    processor: str = "",
    mtp: tuple[str, int] = ModelFamily.mtp,
    **inner: str,
) -> ModelFamily:
    """The family of a package here, whose parts lie where those of all families lie.

    Args:
        package: its `__name__`.
        prefix: what the names of its classes begin with.
        title: the name people know.
        modalities: of text, image, video, audio.
        parts: what `model.freeze` accepts.
        experts: whether tests/distributed/test_matrix.py holds expert parallelism to one rank's gradients, beside the other kinds.
        model, step, processor: `module:attribute` of a part that is not the family's own; those of a family of text have defaults.
        mtp: where the number of MTP layers stands (`ModelFamily.mtp`).
        inner: parts within others by name (`ModelFamily.inner`): prefixes of their parameters' names.
    """
    name = package.rpartition(".")[2]
    if modalities == "text":
        model, step = "zoo.nn.vision_language:LanguageModel", "zoo.steps:PackedStep"
        processor = processor or "zoo.data.processors.text:TextProcessor.build"
    return ModelFamily(
        name=name,
        title=title,
        modalities=tuple(modalities.split()),
        parts=tuple(parts.split()),
        proved=("tp", "sp", "pp", "vpp", "cp", *(("ep", "etp") if experts else ()), "dp"),
        inner={part: tuple(prefixes.split()) for part, prefixes in inner.items()},
        config=f"{package}.config:{prefix}Config",
        model=model or f"{package}.model:{prefix}Model",
        step=step or f"{package}.step:{prefix}Step",
        bridge=f"zoo.bridges.{name}:BRIDGE",
        processor=processor or f"{package}.processor:build_processor",
        mtp=mtp,
    )
