"""The model families: one folder each, imported as `zoo.models.<family>`."""

from zoo.registry import ModelFamily


def family(
    package: str,
    prefix: str,
    title: str,
    *,
    modalities: str,
    parts: str,
    proved: str,
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
        proved: kinds of parallelism that tests/distributed/test_matrix.py holds to one rank's gradients.
        model, step, processor: `module:attribute` of a part that is not the family's own.
        mtp: where the number of MTP layers stands (`ModelFamily.mtp`).
        inner: parts within others by name (`ModelFamily.inner`): prefixes of their parameters' names.
    """
    name = package.rpartition(".")[2]
    return ModelFamily(
        name=name,
        title=title,
        modalities=tuple(modalities.split()),
        parts=tuple(parts.split()),
        proved=tuple(proved.split()),
        inner={part: tuple(prefixes.split()) for part, prefixes in inner.items()},
        config=f"{package}.config:{prefix}Config",
        model=model or f"{package}.model:{prefix}Model",
        step=step or f"{package}.step:{prefix}Step",
        bridge=f"zoo.bridges.{name}:BRIDGE",
        processor=processor or f"{package}.processor:build_processor",
        mtp=mtp,
    )
