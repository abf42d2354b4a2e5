"""What a step trains on, and on which rank it does so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from zoo.steps.losses import DistillationLoss, SpeechLoss
from zoo.steps.objectives.policy import PolicyLoss
from zoo.steps.objectives.preference import AnswerLoss
from zoo.steps.objectives.retrieval import RetrievalLoss

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class StepRank:
    """The rank that a step runs on, and the ranks that it shares micro-batches with."""

    device: torch.device
    cp_group: ProcessGroup | None = None  # context-parallel ranks; None: there is one
    media_group: ProcessGroup | None = None  # ranks that share out the media; None: each encodes all
    encodes_media: bool = True  # it has the towers; else media stay on the host


@dataclass(frozen=True)
class Objective:
    """The loss of training batches.

    It is that of each label, unless another is given: of pairs or labelled answers, of a teacher's tokens, of sampled answers, of
    speech, of queries with candidates. `mtp_weight` is what the mean loss of `mtp_depths` depths counts.
    """

    preference: AnswerLoss | None = None
    distillation: DistillationLoss | None = None
    mtp_depths: int = 0
    mtp_weight: float = 0.0
    policy: PolicyLoss | None = None
    speech: SpeechLoss | None = None
    retrieval: RetrievalLoss | None = None
