"""GLM-4.5V and GLM-4.6V: decoder with experts by sigmoid routing; vision tower with learned places fitted to each image."""

from zoo.models import family

FAMILY = family(
    __name__, "GLM45V", "GLM-4.5V", "text image video", "vision language", experts=True, merger="vision.merger."
)
