"""Qwen2.5-VL: Qwen2's decoder; a vision tower that attends within windows in most of its layers."""

from zoo.models import family

FAMILY = family(__name__, "Qwen25VL", "Qwen2.5-VL", "text image video", "vision language", merger="vision.merger.")
