"""LLaVA 1.5, 1.6 (NeXT) and OneVision: Llama, Mistral or Qwen2 behind a CLIP or SigLIP tower and a projector."""

from zoo.models import family

FAMILY = family(__name__, "Llava", "LLaVA (1.5, NeXT, OneVision)", "text image video", "vision projector language")
