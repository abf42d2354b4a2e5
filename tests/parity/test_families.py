"""zoo gives the logits and gradients of transformers for every family, however the rows are batched.

The two sum in different orders in fp32. Measured of logits up to 5: 4e-6 to 6.5e-6, and 1.5e-5 of the hybrids with the delta
rule; of gradients, relative to the Euclidean norm of each tensor: 2e-6 to 4e-6, and 6e-6 of the hybrids' decays, which are
sums that nearly cancel.
"""

from typing import Any

import pytest
import torch
from support.engine import packed_batch
from support.families import FAMILIES
from support.pairs import Pair, PairTests, TextPairTests, worst

from zoo.steps.media import rank_share

TEXT = [name for name, family in FAMILIES.items() if family.parts == "language"]
TOWERS = [name for name in FAMILIES if name not in TEXT]
TILED = ("internvl", "internvl experts", "internvl qwen2", "llava", "llava_next", "llava_onevision")


@pytest.fixture(scope="module")
def pair(family: str, tmp_path_factory: pytest.TempPathFactory, cpu_world: Any) -> Pair:
    return FAMILIES[family].pair(tmp_path_factory.mktemp("tiny") / "hf", cpu_world)


@pytest.mark.parametrize("family", TEXT, scope="module")
class TestText(TextPairTests):
    """Families of text alone."""


@pytest.mark.parametrize("family", TOWERS, scope="module")
class TestTowers(PairTests):
    """Families with towers."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", TILED, scope="module")
def test_tiles_change_the_logits_of_their_sample_alone(pair: Pair) -> None:
    """So that the tests above can see an embedding that is lost, or that lands in another sample."""
    samples = [pair.examples[name].sample for name in ("wide", "text-short", "two")]
    before = pair.zoo.logits(packed_batch(samples))
    tiles = len(samples[2].media["pixel_values"])
    for tile in range(tiles):
        batch = packed_batch(samples)
        batch.media["pixel_values"][tile - tiles] += 1.0
        wide, text, two = (worst([a], [b]) for a, b in zip(pair.zoo.logits(batch), before, strict=True))
        assert wide == text == 0.0 and two > 1e-3


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ranks", [2, 4, 64])
@pytest.mark.parametrize("family", TILED, scope="module")
def test_what_ranks_encode_of_shared_media_is_what_one_would(ranks: int, pair: Pair) -> None:
    """Tiles and frames go to ranks one by one, LLaVA's images with all their tiles; some ranks may be left without any."""
    media = packed_batch(pair.samples).media
    (tower,) = pair.zoo.step().media_streams(media).values()
    with torch.no_grad():
        whole = pair.zoo.model.encode(media)["vision"].embeddings
        shares = [rank_share(tower, media, rank, ranks) for rank in range(ranks)]
        gathered = torch.zeros(ranks, shares[0].longest, whole.shape[1])
        for mine, share in zip(gathered, shares, strict=True):
            made = pair.zoo.model.encode(share.media)
            assert bool(made) == bool(share.media)
            if made:
                mine[: len(made["vision"].embeddings)] = made["vision"].embeddings
    torch.testing.assert_close(gathered.flatten(0, 1)[shares[0].index], whole, rtol=1e-5, atol=1e-5)
    tiles = [sum(len(share.media[s.data]) for s in tower if s.data in share.media) for share in shares]
    assert max(tiles) - min(tiles) <= max(count for stream in tower for count in stream.rows)
