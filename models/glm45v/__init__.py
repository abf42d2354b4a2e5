"""GLM-4.5V and GLM-4.6V: decoder with experts by sigmoid routing; vision tower with learned places fitted to each image."""

from zoo.models import family

FAMILY = family(
    __name__,
    "GLM45V",
    "GLM-4.5V",
    modalities="text image video",
    parts="vision language",
    merger="vision.merger.",
    proved="tp sp pp vpp cp ep etp dp",
)
