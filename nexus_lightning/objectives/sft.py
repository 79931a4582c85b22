"""Supervised fine-tuning on demonstration chunks."""

from __future__ import annotations

from tensordict import TensorDict
from torch import Tensor

from nexus_lightning.head import ActionHead
from nexus_lightning.objectives.base import Objective
from nexus_lightning.schema import Normalizer


class SFTObjective(Objective):
    """The head's own supervised loss, one optimizer step per minibatch of the job.

    Partition fields (rows = samples): ``features`` (VLAFeature) and ``state`` ``[N, S]`` raw float32 (or
    ``observation`` and ``language_instruction``, which the module encodes minibatch by minibatch), ``actions``
    ``[N, T, A]`` internal convention, ``is_pad`` ``[N, T]`` bool.
    """

    fields = ("actions", "is_pad")

    def __init__(self, head: ActionHead, normalizer: Normalizer, batch_size: int) -> None:
        self.head, self.normalizer, self.batch_size = head, normalizer, batch_size

    def row_weights(self, data: TensorDict) -> dict[str, Tensor]:
        """How many elements of each row count."""
        return {"loss": self.head.loss_elements(self.normalizer.normalize_action(data["actions"]), data["is_pad"])}

    def loss(
        self, batch: TensorDict | None, jobs_completed: int, shares: dict[str, float] | None = None
    ) -> dict[str, Tensor]:
        """The head's own."""
        del jobs_completed
        assert batch is not None
        state = self.normalizer.normalize_state(batch["state"])
        actions = self.normalizer.normalize_action(batch["actions"])
        losses = self.head.loss(batch["features"], state, actions, batch["is_pad"])
        return losses if shares is None else {k: v * shares["loss"] for k, v in losses.items()}
