"""From a recipe to the loss that its steps train with."""

from __future__ import annotations

from zoo.config.derived import trains_thinker
from zoo.config.schema import Recipe
from zoo.nn.family import FamilyConfig
from zoo.steps import Objective
from zoo.steps.losses import DistillationLoss, SpeechLoss
from zoo.steps.objectives.policy import PolicyLoss
from zoo.steps.objectives.preference import AnswerLoss, KTOLoss, PreferenceLoss
from zoo.steps.objectives.retrieval import RetrievalLoss


def objective_of(config: FamilyConfig, recipe: Recipe) -> Objective:
    """The loss of a validated recipe."""
    train, distill, embed, speech = recipe.train, recipe.distill, recipe.embed, None
    if train.speech_loss and (talker := getattr(config, "talker", None)):
        speech = SpeechLoss(train.speech_loss, train.residual_loss, talker.codebooks, trains_thinker(recipe))
    retrieval = RetrievalLoss(embed.temperature, tuple(embed.dimensions), embed.pooling)
    return Objective(
        preference=preference_loss(recipe),
        distillation=None if distill.teacher is None else DistillationLoss(distill.weight, distill.temperature),
        mtp_depths=config.mtp_layers(recipe),
        mtp_weight=train.mtp_loss,
        policy=_policy_loss(recipe),
        speech=speech,
        retrieval=retrieval if train.embeds else None,
    )


def preference_loss(recipe: Recipe) -> AnswerLoss | None:
    """The loss of pairs or labelled answers that a recipe trains with; None where it learns answers by themselves."""
    train = recipe.train
    if train.labelled:
        return KTOLoss(train.beta, train.desirable_weight, train.undesirable_weight)
    if not train.pairs:
        return None
    beta = 1.0 if train.scores else train.beta
    return PreferenceLoss(train.loss, beta, train.label_smoothing, train.simpo_gamma, center=train.center_rewards)


def _policy_loss(recipe: Recipe) -> PolicyLoss | None:
    """The loss of sampled answers that a recipe of reinforcement learning trains with."""
    rl = recipe.rl
    if rl.algorithm is None:
        return None
    assert rl.clip_low is not None and rl.clip_high is not None  # derived by validate
    cap = rl.importance_cap if rl.importance == "truncated" else None
    referenced = rl.reference != "none"
    return PolicyLoss(rl.algorithm, rl.clip_low, rl.clip_high, rl.kl, rl.entropy, cap, referenced, rl.temperature)
