"""What is special to Qwen3-ASR: its audio tower and projector, clip by clip."""

import torch
from support.families import pair_of
from support.pairs import Pair
from torch import Tensor

from zoo.nn.towers.audio import audio_tokens

# Mel frames (10 ms each) of clips: under a chunk of 100 frames, a whole chunk, over an attention window of 200.
FRAMES = [50, 250, 100, 8, 99, 1, 512, 101]
pair = pair_of("qwen3_asr")


def test_clips_of_any_length_side_by_side_give_what_each_gives_alone(pair: Pair) -> None:
    """Embeddings and gradients, against transformers' encoder and projector run on each clip by itself."""
    generator = torch.Generator().manual_seed(0)
    clips = [torch.randn(n, 80, generator=generator) for n in FRAMES]
    tower, projector, hf = pair.zoo.model.audio, pair.zoo.model.projector, pair.hf.model

    def alone(clip: Tensor) -> Tensor:
        whole = torch.nn.functional.pad(clip, (0, 0, 0, -len(clip) % 100))
        mask = (torch.arange(len(whole)) < len(clip)).long()
        return hf.get_audio_features(whole.T[None], mask[None]).pooler_output

    hf.zero_grad(set_to_none=True)
    wanted = torch.cat([alone(clip) for clip in clips])
    for order in (range(len(clips)), [3, 0, 4, 5]):
        picked = list(order)
        found = projector(tower(torch.cat([clips[i] for i in picked]), [FRAMES[i] for i in picked]))
        apart = wanted.split([audio_tokens(n, 50) for n in FRAMES])
        torch.testing.assert_close(found, torch.cat([apart[i] for i in picked]), rtol=0, atol=1e-5)
    found = projector(tower(torch.cat(clips), FRAMES))
    for model, out in ((hf, wanted), (pair.zoo.model, found)):
        model.zero_grad(set_to_none=True)
        out.square().sum().backward()
    names = {"audio": "audio_tower", "projector": "multi_modal_projector"}
    for ours, theirs in names.items():
        own = getattr(pair.zoo.model, ours).named_parameters()
        hers = dict(getattr(hf, theirs).named_parameters())
        for name, parameter in own:
            if not name.endswith("k_proj.bias"):  # zero but for rounding
                want = hers[name].grad
                assert float((parameter.grad - want).norm() / want.norm()) < 1e-5, name
    for model in (pair.hf, pair.zoo.model):
        model.zero_grad(set_to_none=True)
