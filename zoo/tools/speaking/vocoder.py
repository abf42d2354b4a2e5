"""The module of a checkpoint that makes audio of codes: transformers' own, with the weights that training carries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import soundfile
import torch
from torch import Tensor

from zoo.bridge.files.safetensors_io import SafetensorsFolder
from zoo.checkpoint.loading import started_from
from zoo.errors import UserError
from zoo.model.build import Assembly


@dataclass(frozen=True)
class Vocoder:
    """Turns codes into audio."""

    module: Any
    rate: int  # Hz
    device: torch.device

    @classmethod
    def load(cls, assembly: Assembly, device: torch.device) -> Vocoder:
        """That of a checkpoint, in fp32; UserError where there is none."""
        config: Any = assembly.config
        module, prefix, rate = config.build_vocoder()
        source, tensors = assembly.source, dict[str, Tensor]()
        if source is not None and source.kind == "run":  # it has what it trained
            source = started_from(source)
        if source is not None:
            with SafetensorsFolder(source.weights) as folder:
                tensors = {n.removeprefix(prefix): folder.get(n) for n in folder.names() if n.startswith(prefix)}
        if not tensors:
            raise UserError(
                f"{source.folder if source else assembly.family.title}: it has no tensors {prefix}*, which make audio of codes; set audio=false"
            )
        module.load_state_dict(tensors)
        return cls(module.float().to(device).eval(), rate, device)

    @torch.no_grad()
    def write(self, codes: Tensor, voice: Mapping[str, Tensor], seed: int, path: Path) -> None:
        """A wav file, 16 bit mono, of codes (frames, codebooks); `voice`: what `SpeechCodes.voice` gives. `seed`: of noise that it begins with."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            waveform = self.module.waveform(
                codes.to(self.device), **{name: x.to(self.device) for name, x in voice.items()}
            )
        soundfile.write(path, waveform.clip(-1, 1).float().cpu().numpy(), self.rate, subtype="PCM_16")
