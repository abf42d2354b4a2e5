"""Qwen3-Next: text alone; gated delta rule and gated attention layers with many small experts; MTP."""

from zoo.models import family

FAMILY = family(
    __name__, "Qwen3Next", "Qwen3-Next", "text", "language", experts=True, mtp=("num_nextn_predict_layers", 1)
)
