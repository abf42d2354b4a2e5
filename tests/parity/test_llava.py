"""zoo's LLaVA gives transformers' logits and gradients in its three variants, however the rows are batched.

The two sum in different orders in fp32. Measured: 4e-6 of logits up to 5; 2e-6 of gradients, relative to the Euclidean
norm of each tensor.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import Batch, Zoo, packed_batch, padded_batch
from support.pairs import Pair, PairTests, Tensors, relative_errors, worst
from support.rows import tile_examples
from support.tiny import load_plain
from support.tiny_llava import CLIP, MISTRAL, QWEN2, SIGLIP, VARIANTS, publish, tiny_config, write_tiny_llava
from torch import Tensor

from zoo.data.sample import Sample
from zoo.errors import UserError
from zoo.models.llava.config import LlavaConfig
from zoo.steps.media import rank_share

LOGITS = 1e-5
GRADIENTS = 1e-5
FAMILY = "model.family=llava"


def trained(gradients: Mapping[str, Tensor | None]) -> Tensors:
    """Gradients that say something: keys' biases in the tower cancel in the softmax, what lies behind it has none."""
    nothing = ("vision", "model.vision_tower")
    return {
        name: gradient
        for name, gradient in gradients.items()
        if gradient is not None and not (name.startswith(nothing) and name.endswith("k_proj.bias"))
    }


class LlavaZoo(Zoo):
    """Logits of expanded rows, and gradients of what is trained."""

    @torch.no_grad()
    def logits(self, batch: Any, **packing: Any) -> list[Tensor]:
        step = self.step(**packing)
        layout = step.pack(batch, step.capture(batch)).layout
        out = self.model(step.prepare(batch, logits=True)[0])
        rows = out if step.packing.mode == "none" else out[0].split(layout.padded_lengths)
        return [row[:length] for row, length in zip(rows, layout.lengths, strict=True)]

    def gradients(self, *args: Any, **kwargs: Any) -> tuple[float, dict[str, Tensor | None]]:
        loss, found = super().gradients(*args, **kwargs)
        return loss, {**trained(found)}


class LlavaPair(Pair):
    """A pair whose tower ends before its last layer."""

    @cached_property
    def wanted(self) -> tuple[float, Tensors]:
        self.hf.zero_grad(set_to_none=True)
        means = [self.hf(**e.features, labels=e.sample.labels[None]).loss for e in self.examples.values()]
        shares = torch.tensor([sample.num_labels / self.count for sample in self.samples])
        loss = torch.stack(means) @ shares
        loss.backward()
        return loss.item(), publish(trained({name: p.grad for name, p in self.hf.named_parameters()}))


def load(folder: Path, world: Any, *overrides: str) -> LlavaPair:
    again = partial(LlavaZoo.load, folder, world, FAMILY, *overrides)
    hf, zoo = load_plain(folder), again()
    examples = tile_examples(zoo.assembly.processor)
    with torch.no_grad():
        logits = [hf(**example.features).logits[0] for example in examples.values()]
    return LlavaPair(hf, zoo, examples, logits, LOGITS, GRADIENTS, publish, again)


@pytest.fixture(scope="module", params=VARIANTS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llava(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def pair(folder: Path, cpu_world: Any) -> LlavaPair:
    return load(folder, cpu_world)


class TestRows(PairTests):
    """What every family with a vision tower must pass."""

    def test_the_rows_are_what_they_should_be(self, pair: Pair) -> None:
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
        assert media["text-short"] == {}
        for logits in pair.logits:
            assert 0.5 < float(logits.std()) < 2, "of order one, so that an absolute error means something"

    def test_text_alone_leaves_the_tower_a_zero_gradient(self, pair: Pair) -> None:
        samples = [pair.examples[name].sample for name in ("text-short", "text-long")]
        _, gradients = pair.zoo.gradients([packed_batch(samples)], pair.count)
        names = {name for name, p in pair.zoo.model.named_parameters() if p.requires_grad}
        assert trained(dict.fromkeys(names, torch.zeros(0))).keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert gradient is not None
            assert bool(gradient.any()) != name.startswith(("vision.", "projector.")), name


def test_images_change_the_logits_of_their_sample_alone(pair: LlavaPair) -> None:
    """So that the tests above can see an embedding that is lost, or that lands in another sample."""
    samples = [pair.examples[name].sample for name in ("wide", "text-short", "two")]
    before = pair.zoo.logits(packed_batch(samples))
    for tile in range(len(samples[2].media["pixel_values"])):
        batch = packed_batch(samples)
        batch.media["pixel_values"][tile - len(samples[2].media["pixel_values"])] += 1.0
        wide, text, two = (worst([a], [b]) for a, b in zip(pair.zoo.logits(batch), before, strict=True))
        assert wide == text == 0.0 and two > 1e-3


def test_tiles_of_images_of_any_size_are_laid_out_alike(pair: LlavaPair) -> None:
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
def test_one_placeholder_a_medium_gives_the_same(shape: str, packing: dict, pair: LlavaPair) -> None:
    """As processors before transformers 4.46 leave them, and as today's do."""
    samples = [collapsed(sample, pair.zoo.assembly.config) for sample in pair.samples]
    assert sum(sample.length for sample in samples) < sum(sample.length for sample in pair.samples)
    batch = packed_batch(samples) if shape == "packed" else padded_batch(samples, "mixed")
    assert worst(pair.zoo.logits(batch, **packing), pair.logits) < LOGITS
    loss, gradients = pair.zoo.gradients([batch], pair.count, **packing)
    assert loss == pytest.approx(pair.wanted[0], rel=1e-6)
    assert max(relative_errors(pair.zoo.published(gradients), pair.wanted[1]).values()) < GRADIENTS


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
def test_conflicting_counts_are_an_error(wrong: int, pair: LlavaPair) -> None:
    """An expansion of what is expanded, or of what was cut, would move every row behind it."""
    sample = pair.examples["two"].sample
    (place, *_) = (sample.input_ids == pair.zoo.assembly.config.media_tokens[0]).nonzero()[:, 0].tolist()
    keep = [*range(place + max(wrong, 0)), *range(place - min(wrong, 0), sample.length)]
    other = replace(sample, input_ids=sample.input_ids[keep], labels=sample.labels[keep])
    with pytest.raises(ValueError, match=r"placeholder tokens .* are wanted"):
        pair.zoo.step().prepare(packed_batch([pair.examples["wide"].sample, other]))


def test_videos_of_different_lengths_in_a_sample(tmp_path_factory: Any, cpu_world: Any) -> None:
    """transformers' model takes videos of one length in a call; here each is what it is alone."""
    zoo = Zoo.load(write_tiny_llava(tmp_path_factory.mktemp("videos"), "llava_onevision"), cpu_world, FAMILY)
    frames, ends = torch.randn(5, 3, 26, 26), torch.tensor([0, 1, 0, 0, 1])
    whole = zoo.model.encode({"pixel_values_videos": frames, "video_ends": ends})["vision"].embeddings
    parts = [
        zoo.model.encode({"pixel_values_videos": frames[at], "video_ends": ends[at]})["vision"].embeddings
        for at in (slice(2), slice(2, 5))
    ]
    assert [len(part) for part in parts] == [2 * 4 + 1, 3 * 4 + 1]
    torch.testing.assert_close(whole, torch.cat(parts), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_what_ranks_encode_of_shared_media_is_what_one_would(ranks: int, pair: LlavaPair) -> None:
    """Images go to a rank with all their tiles, frames one by one; some ranks may be left without any."""
    media = packed_batch(pair.samples).media
    (tower,) = pair.zoo.step().media_streams(media).values()
    with torch.no_grad():
        whole = pair.zoo.model.encode(media)["vision"].embeddings
        shares = [rank_share(tower, media, rank, ranks) for rank in range(ranks)]
        gathered = torch.zeros(ranks, shares[0].longest, whole.shape[1])
        for mine, share in zip(gathered, shares, strict=True):
            made = pair.zoo.model.encode(share.media)
            if made:
                mine[: len(made["vision"].embeddings)] = made["vision"].embeddings
            assert bool(made) == bool(share.media)
    found = gathered.flatten(0, 1)[shares[0].place]
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)
    tiles = [sum(len(share.media[s.data]) for s in tower if s.data in share.media) for share in shares]
    assert max(tiles) - min(tiles) <= max(count for stream in tower for count in stream.rows)


# ---------------------------------------------------------------- packed against unpacked


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
    zoo = Zoo.load(folder, cpu_world, FAMILY)
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


# ---------------------------------------------------------------- other architectures


ROPE = {"rope_type": "default", "rope_theta": 300.0}
BUILT = [
    pytest.param("llava", {"vision_feature_layer": [-2, 1, -1]}, id="several layers"),
    pytest.param("llava", {"vision_feature_layer": 3}, id="layer counted from the front"),
    pytest.param("llava", {"vision_feature_select_strategy": "full"}, id="with the class"),
    pytest.param("llava", {"multimodal_projector_bias": False, "projector_hidden_act": "relu"}, id="projector"),
    pytest.param("llava", {"vision": SIGLIP, "vision_feature_select_strategy": "full"}, id="SigLIP in 1.5"),
    pytest.param("llava", {"text": QWEN2 | {"num_key_value_heads": 6}}, id="Qwen2 in 1.5"),
    pytest.param("llava_next", {"text": {"model_type": "llama", "rope_parameters": ROPE}}, id="Llama in NeXT"),
    pytest.param("llava_next", {"vision_feature_layer": [-1, 2]}, id="several layers of tiles"),
    pytest.param("llava_next", {"text": MISTRAL | {"sliding_window": 4096}}, id="a window that is not reached"),
    pytest.param("llava_onevision", {"vision_aspect_ratio": "anyres_max_9"}, id="nine tiles at most"),
    pytest.param("llava_onevision", {"vision": {"vision_use_head": True}}, id="a pooling head that is not used"),
    pytest.param("llava_onevision", {"tied": True, "text": {"tie_word_embeddings": True}}, id="tied embeddings"),
    pytest.param(
        "llava_onevision",
        {"vision": CLIP | {"image_size": 26}, "vision_feature_select_strategy": "default"},
        id="CLIP in OneVision",
    ),
]


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("kind", "change"), BUILT)
def test_other_architectures(kind: str, change: dict, tmp_path: Path, cpu_world: Any) -> None:
    tied = change.get("tied", False)  # logits are then about six times larger
    folder = write_tiny_llava(tmp_path, kind, seed=1, **change)
    pair = load(folder, cpu_world, "packing.budget=4096")
    assert pair.zoo.assembly.config.tied == tied
    found = pair.zoo.logits(packed_batch(pair.samples), align=4)
    assert worst(found, pair.logits) < (10 if tied else 2) * LOGITS
    _, gradients = pair.zoo.gradients([packed_batch(pair.samples)], pair.count)
    errors = relative_errors(pair.zoo.published(gradients), pair.wanted[1])
    assert max(errors.values()) < 2 * GRADIENTS


LINEAR = {"rope_type": "linear", "rope_theta": 300.0, "factor": 4.0}
REFUSED = [
    pytest.param("llava", {"text": {"rope_parameters": LINEAR}}, "rope_type is 'linear'", id="scaled rope"),
    pytest.param("llava", {"text": {"hidden_act": "gelu"}}, "hidden_act is 'gelu'", id="activation"),
    pytest.param("llava", {"text": {"attention_bias": True}}, "attention_bias is True", id="attention bias"),
    pytest.param("llava", {"text": {"mlp_bias": True}}, "mlp_bias is True", id="MLP bias"),
    pytest.param("llava_next", {"text": {"sliding_window": 64}}, "set packing.budget=64", id="short window"),
    pytest.param(
        "llava_onevision",
        {"text": {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}},
        "use_sliding_window is True",
        id="windowed layers",
    ),
]


@pytest.mark.parametrize(("kind", "change", "complaint"), REFUSED)
def test_decoders_that_are_not_built_are_refused(
    kind: str, change: dict, complaint: str, tmp_path: Path, cpu_world: Any
) -> None:
    with pytest.raises(UserError, match=complaint):  # its own config is read where it is written, too
        Zoo.load(write_tiny_llava(tmp_path, kind, **change), cpu_world, FAMILY)


@pytest.mark.parametrize(
    ("kind", "change", "complaint"),
    [
        ("llava", {"text_config": {"model_type": "gemma"}}, r"text_config.model_type is 'gemma'; .* qwen2 only"),
        ("llava", {"vision_config": {"model_type": "clip"}}, r"vision_config.model_type is 'clip"),
        ("llava", {"vision_feature_layer": -6}, "layers of the tower, 1 to 4 or -4 to -1"),
        ("llava_next", {"vision_feature_select_strategy": "full"}, "17 embeddings a tile of 4 x 4 patches"),
        ("llava_next", {"image_grid_pinpoints": [[32, 40]]}, r"has \[32, 40\]; wanted multiples of .* 32"),
        ("llava_onevision", {"vision_aspect_ratio": "anyres"}, "vision_aspect_ratio is 'anyres'; wanted anyres_max_9"),
        ("qwen2_vl", {}, "model_type 'qwen2_vl' is not LLaVA"),
    ],
)
def test_configs_that_are_not_built_are_refused(kind: str, change: dict, complaint: str) -> None:
    arch = tiny_config(kind if kind in VARIANTS else "llava").to_dict() | {"model_type": kind}
    for key, value in change.items():
        arch[key] = arch[key] | value if isinstance(value, dict) else value
    with pytest.raises(UserError, match=complaint):
        LlavaConfig.from_arch(arch)
