"""An export through the stage: written at the local disk's speed, and copied on as a whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from zoo.bridge.files.record import RECORD
from zoo.bridge.files.side_files import CARD, write_card
from zoo.bridge.files.writer import ExportWriter
from zoo.checkpoint import export, integrity, lora_files, model_card
from zoo.checkpoint.sharded_state import Trainable
from zoo.checkpoint.staging.copying import Files, deal
from zoo.checkpoint.staging.stage import EXPORT, Stage
from zoo.config.schema import Recipe
from zoo.files import size_in_bytes
from zoo.model.build import Assembly
from zoo.parallel.weight_gathering import settle_all
from zoo.parallel.world import World


def export_trained(
    trainable: Trainable,
    assembly: Assembly,
    recipe: Recipe,
    world: World,
    stage: Stage | None,
    target: Path,
    steps: int,
) -> str:
    """What a run has trained in so many `steps`, as a Hugging Face folder or as PEFT's adapter; says which.

    Raises as `write_through` does.
    """
    settle_all()

    def write(folder: Path) -> None:
        if trainable.adapters is not None:
            lora_files.export_adapters(trainable.adapters, folder, assembly, recipe, world, steps)
            return
        chunks, source = list(trainable.chunks), assembly.source
        about = partial(model_card.trained, recipe, steps, source, ends=assembly.processor.ends)
        shard_bytes = size_in_bytes(recipe.max_shard_size, "max_shard_size")
        export.export(chunks, folder, assembly, world, source, card=about, shard_bytes=shard_bytes, overwrite="aside")

    write_through(stage, target, steps, write)
    if trainable.adapters is None:
        return "a Hugging Face folder"
    servers = lora_files.for_servers(trainable.adapters, assembly)
    how = f"to serve it: {servers}" if servers else "merged: zoo convert RUN FOLDER"
    return f"an adapter that peft loads; {how}".replace("RUN", str(recipe.run.dir))


def write_through(stage: Stage | None, target: Path, step: int, write: Callable[[Path], object]) -> None:
    """Have `write` make a folder in the stage and copy it to `target`; without a stage that all ranks share, make it there.

    Every rank calls it, after all checkpoints are copied, and leaves `write` when the folder is whole. Raises what `write`
    raises, and OSError where the copy fails, also when it is tried again.
    """
    if stage is None or len(stage.sharing) < stage.ranks:
        write(target)
        return
    staged = stage.folder / EXPORT
    write(staged)
    control, main = stage.control, stage.is_main
    names = [name for name in integrity.files_of(staged) if name != RECORD]
    sizes = {name: (staged / name).stat().st_size for name in names}
    local_files = deal([sizes] * stage.ranks, sizes, staged)[stage.rank]

    def publish() -> None:
        if (staged / CARD).is_file():
            write_card(writer.partial, writer.target, (staged / CARD).read_text(encoding="utf-8"))
        writer.replace_target()

    with ExportWriter(target, overwrite="aside") as writer:
        files = Files(staged, writer.partial, {}, stage.tick)
        control.together(lambda: writer.begin() if main else None)
        control.together(lambda: stage.retried(lambda: files.copy(local_files), step, "the export"))
        control.together(lambda: publish() if main else None)
    stage.remove(staged)
