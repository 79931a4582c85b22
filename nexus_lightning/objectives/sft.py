"""Supervised fine-tuning on demonstration chunks."""

from __future__ import annotations

from tensordict import TensorDict
from torch import Tensor

from nexus_lightning.objectives.base import Objective


class SFT(Objective):
    """The head's own supervised loss, one optimizer step per minibatch of the job.

    Partition fields (rows = samples): ``features`` (VLAFeature) and ``state`` ``[N, S]`` raw float32 (or
    ``observation`` and ``language_instruction``, which the module encodes minibatch by minibatch), ``actions``
    ``[N, T, A]`` internal convention, ``is_pad`` ``[N, T]`` bool.
    """

    task = "sft"
    default = True
    fields = ("actions", "is_pad")
    arrays = ("action", "is_pad?")

    def row_weights(self, data: TensorDict) -> dict[str, Tensor]:
        """How many elements of each row count."""
        return {"loss": self.head.loss_elements(self.normalizer.normalize_action(data["actions"]), data["is_pad"])}

    def minibatch_loss(self, batch: TensorDict, jobs_completed: int) -> dict[str, Tensor]:
        """The head's own."""
        del jobs_completed
        state = self.normalizer.normalize_state(batch["state"])
        actions = self.normalizer.normalize_action(batch["actions"])
        return self.head.loss(batch["features"], state, actions, batch["is_pad"])
