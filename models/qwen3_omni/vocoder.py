"""What makes sound of Qwen3-Omni's codes: transformers' module, which is not trained here."""

from __future__ import annotations

from torch import Tensor
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav


class Code2Wav(Qwen3OmniMoeCode2Wav):
    """transformers' module, with the interface of every vocoder."""

    def waveform(self, codes: Tensor) -> Tensor:
        """(N,) waveform of frames (F, codebooks) int64."""
        waves: Tensor = self.chunked_decode(codes.T[None])
        return waves[0, 0]
