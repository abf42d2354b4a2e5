"""InternVL 3 and 3.5: Qwen2 or Qwen3 behind InternViT, whose tiles are shuffled to fewer, wider embeddings."""

from zoo.models import family

FAMILY = family(
    __name__, "InternVL", "InternVL (3, 3.5)", "text image video", "vision projector language", experts=True
)
