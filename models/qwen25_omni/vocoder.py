"""What makes sound of Qwen2.5-Omni's codes: transformers' module, which is not trained here."""

from __future__ import annotations

from torch import Tensor
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel


class Token2Wav(Qwen2_5OmniToken2WavModel):
    """transformers' module, with the interface of every vocoder. It begins with noise, which torch's own generator draws."""

    def waveform(self, codes: Tensor, **voice: Tensor) -> Tensor:
        """(N,) waveform of frames (F, 1) int64; `voice`: conditioning (1, C) and reference_mel (1, M, mel) of the speaker."""
        wave: Tensor = self(codes.T, **voice)
        return wave.reshape(-1)
