"""What is special to LLaVA: tiles of its three variants, one placeholder a medium, parts that are never trained."""

from dataclasses import replace
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import Batch, Zoo, packed_batch, padded_batch
from support.families import pair_of
from support.pairs import Pair, worst
from support.tiny_llava import VARIANTS, write_tiny_llava
from torch import Tensor

from zoo.data.sample import Sample
from zoo.models.llava.config import LlavaConfig

pair = pair_of("llava", "llava_next", "llava_onevision")


def test_rows_are_cut_into_tiles(pair: Pair) -> None:
    media = {name: example.sample.media for name, example in pair.examples.items()}
    kind = pair.zoo.assembly.config.hf.model_type
    tiles = {name: m["image_tiles"][:, 2].tolist() for name, m in media.items() if "image_tiles" in m}
    assert {name: tiles[name] for name in ("wide", "tall", "square", "two")} == {
        "llava": {"wide": [1], "tall": [1], "square": [1], "two": [1, 1]},
        "llava_next": {"wide": [4], "tall": [4], "square": [5], "two": [5, 4]},
        "llava_onevision": {"wide": [7], "tall": [7], "square": [10], "two": [1, 1]},
    }[kind]
    config = pair.zoo.assembly.config
    if config.lines:
        grids = [config.tiling.grid(*media[name]["image_tiles"][0, :2].tolist()) for name in tiles]
        assert any(grid.above for grid in grids) and any(grid.left for grid in grids)
        assert any(grid.scaled for grid in grids) == config.has_video
    if config.has_video:
        assert int(media["video+video+image"]["video_ends"].sum()) == 2


def test_tiles_of_images_of_any_size_are_laid_out_alike(pair: Pair) -> None:
    """As transformers' `pack_image_features` lays them out, to the bit."""
    config, sizes = pair.zoo.assembly.config, torch.randint(10, 400, (60, 2), generator=torch.Generator())
    if not config.lines:
        return
    for size in sizes.tolist():
        features = torch.randn(config.tiling.tiles(*size), config.tiling.tile_tokens, 48)
        newline = pair.hf.model.image_newline
        strategy = {} if config.has_video else {"vision_feature_select_strategy": "default"}
        options = {"vision_aspect_ratio": config.hf.vision_aspect_ratio} if config.has_video else strategy
        (wanted,), _ = pair.hf.model.pack_image_features([features], [size], image_newline=newline, **options)
        found = pair.zoo.model._image(features, *size)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        assert len(found) == config.tiling.image_tokens(*size, len(features))


@pytest.mark.sampled(7)
@pytest.mark.parametrize("packing", [{}, {"align": 4}, {"mode": "none"}], ids=str)
@pytest.mark.parametrize("shape", ["packed", "padded"])
def test_one_placeholder_a_medium_gives_the_same(shape: str, packing: dict, pair: Pair) -> None:
    """As processors before transformers 4.46 leave them, and as today's do."""
    samples = [collapsed(sample, pair.zoo.assembly.config) for sample in pair.samples]
    assert sum(sample.length for sample in samples) < sum(sample.length for sample in pair.samples)
    batch = packed_batch(samples) if shape == "packed" else padded_batch(samples, "mixed")
    assert worst(pair.zoo.logits(batch, **packing), pair.logits) < pair.logits_limit
    pair.assert_gradients([batch], **packing)


def collapsed(sample: Any, config: LlavaConfig) -> Any:
    """The sample with one placeholder for each medium."""
    sizes = sample.media.get("image_tiles", torch.zeros(0, 3)).tolist()
    ends = sample.media.get("video_ends", torch.zeros(0)).nonzero()[:, 0].tolist()
    frames = [last - before for before, last in pairwise([-1, *ends])]
    outputs = (
        [config.tiling.image_tokens(*size) for size in sizes],
        [count * config.tiling.pooled**2 + 1 for count in frames],
    )
    left = {token: iter(counts) for token, counts in zip(config.media_tokens, outputs, strict=False)}
    keep, index, ids = [], 0, sample.input_ids.tolist()
    while index < len(ids):
        keep.append(index)
        index += next(left[ids[index]]) if ids[index] in left else 1
    return replace(sample, input_ids=sample.input_ids[keep], labels=sample.labels[keep])


@pytest.mark.parametrize("wrong", [-1, 1], ids=["one too few", "one too many"])
def test_conflicting_counts_are_an_error(wrong: int, pair: Pair) -> None:
    """An expansion of what is expanded, or of what was cut, would move every row behind it."""
    sample = pair.examples["two"].sample
    (place, *_) = (sample.input_ids == pair.zoo.assembly.config.media_tokens[0]).nonzero()[:, 0].tolist()
    keep = [*range(place + max(wrong, 0)), *range(place - min(wrong, 0), sample.length)]
    other = replace(sample, input_ids=sample.input_ids[keep], labels=sample.labels[keep])
    with pytest.raises(ValueError, match=r"placeholder tokens .* are wanted"):
        pair.zoo.step().prepare(packed_batch([pair.examples["wide"].sample, other]))


def test_videos_of_different_lengths_in_a_sample(tmp_path_factory: Any, cpu_world: Any) -> None:
    """transformers' model takes videos of one length in a call; here each is what it is alone."""
    zoo = Zoo.load(
        write_tiny_llava(tmp_path_factory.mktemp("videos"), "llava_onevision"), cpu_world, "model.family=llava"
    )
    frames, ends = torch.randn(5, 3, 26, 26), torch.tensor([0, 1, 0, 0, 1])
    whole = zoo.model.encode({"pixel_values_videos": frames, "video_ends": ends})["vision"].embeddings
    parts = [
        zoo.model.encode({"pixel_values_videos": frames[at], "video_ends": ends[at]})["vision"].embeddings
        for at in (slice(2), slice(2, 5))
    ]
    assert [len(part) for part in parts] == [2 * 4 + 1, 3 * 4 + 1]
    torch.testing.assert_close(whole, torch.cat(parts), rtol=1e-5, atol=1e-5)


TILES = (1, 2, 1, 3, 1)
PIXELS = {1: (50, 40), 2: (31, 30), 3: (33, 70)}  # height and width that are cut into so many


def tiled(count: int, zoo: Zoo) -> list[Sample]:
    """Samples of random text and images with TILES tiles by turns, two images in every third sample."""
    config = zoo.assembly.config
    draw = torch.Generator().manual_seed(count)
    tiles = cycle(TILES)
    samples = []
    for number in range(count):
        images = [next(tiles) for _ in range(1 + (number % 3 == 2))]
        sizes = [(*PIXELS[n], n) for n in images]
        pieces = []
        for size in sizes:
            text = torch.randint(1, 300, (3 + number % 4,), generator=draw)
            pieces += [text, torch.full((config.tiling.image_tokens(*size),), config.media_tokens[0])]
        ids = torch.cat((*pieces, torch.randint(1, 300, (9,), generator=draw)))
        pixels = torch.randn(sum(images), 3, 32, 32, generator=draw)
        media = {"pixel_values": pixels, "image_tiles": torch.tensor(sizes)}
        samples.append(Sample(ids, ids.masked_fill(ids == config.media_tokens[0], -100), media))
    return samples


@pytest.mark.parametrize("count", [1, 4, 16])
def test_probabilities_packed_against_unpacked(
    count: int, tmp_path: Path, cpu_world: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """exp(mean |difference of log-probabilities|), with 1, 2, 1, 3, 1 tiles an image and several images a sample."""
    pinpoints = [[32, 32], [32, 64]]
    folder = write_tiny_llava(tmp_path, "llava_next", image_grid_pinpoints=pinpoints)
    zoo = Zoo.load(folder, cpu_world, "model.family=llava")
    samples = tiled(count, zoo)

    def logprobs(batch: Batch) -> list[Tensor]:
        step = zoo.step()
        inputs, loss_inputs = step.prepare(batch, logprobs=True)
        with torch.no_grad():
            found = step.logprobs(step.forward(zoo.model, inputs), loss_inputs)
        return [row[row != 0] for row in found]

    alone = torch.cat([row for sample in samples for row in logprobs(packed_batch([sample]))])
    packed = torch.cat(logprobs(padded_batch(samples)))
    assert alone.shape == packed.shape and len(alone) > 5 * count
    ratio = float((alone - packed).abs().mean().exp())
    with capsys.disabled():
        print(f"\n{count} samples a row, {len(alone)} tokens: {ratio:.6f}")
    assert f"{ratio:.6f}" == "1.000000"


def test_parts_that_can_be_frozen(tmp_path: Path, cpu_world: Any) -> None:
    """What ends a line of patches belongs to the projector; what lies behind the layer looked at is never trained."""
    from zoo.model.build import freeze

    zoo = Zoo.load(write_tiny_llava(tmp_path, "llava_next"), cpu_world, "model.family=llava")
    trained = {name for name, p in zoo.model.named_parameters() if p.requires_grad}
    behind = {name for name, _ in zoo.model.named_parameters()} - trained
    assert {name.rpartition("layers.")[2].partition(".")[0] for name in behind} == {"3", "vision"}
    for part, left in (("projector", "projector."), ("vision", "vision."), ("language", "")):
        freeze([zoo.model], zoo.recipe.replace({"model.freeze": [part]}), zoo.assembly.family)
        trained = {name for name, p in zoo.model.named_parameters() if p.requires_grad}
        assert not any(name.startswith(left) for name in trained)
        assert trained or part == "language"


@pytest.mark.parametrize("kind", VARIANTS)
def test_its_processor_is_one_of_transformers(kind: str, tmp_path: Path) -> None:
    from transformers import AutoProcessor

    assert type(AutoProcessor.from_pretrained(write_tiny_llava(tmp_path, kind))).__name__.startswith("Llava")
