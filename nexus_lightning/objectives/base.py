"""What an objective is: the columns it reads, which rows are an optimizer step, and the loss of those rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tensordict import TensorDict
from torch import Tensor

from nexus_lightning.shares import Minibatch, RowWeights, cut_in_order, rows_of


class Objective:
    """What the jobs of one tenant minimise. The training step calls, for each job and on every rank::

        data     = objective.counted(data)                        # rows that train
        weights  = objective.row_weights(data)                    # told to the other ranks
        for part in objective.cut([weights of every rank], rank): # the same minibatches everywhere
            losses = objective.loss(data[part.rows], jobs_completed, part.shares)

    With one rank its shares are 1. Nothing here calls a collective.
    """

    #: Columns of a job's partition besides the observation or its features.
    fields: tuple[str, ...] = ()
    #: What the means in :meth:`loss` are taken over, by name; :meth:`row_weights` has one tensor for each.
    means: tuple[str, ...] = ("loss",)
    #: Observations are encoded once per job (several epochs read them), not minibatch by minibatch.
    encode_whole_job = False
    #: The step normalises the column ``advantage`` over the rows of all ranks.
    normalizes_advantages = False
    #: A rank without a row of a minibatch calls :meth:`loss` all the same, with None.
    trains_without_rows = False
    #: Samples of a minibatch, of all ranks together.
    batch_size: int

    def counted(self, data: TensorDict) -> TensorDict:
        """The rows that train."""
        return data

    def row_weights(self, data: TensorDict) -> dict[str, Tensor]:
        """Name of a mean -> what every row weighs in it, ``[N]``."""
        raise NotImplementedError(f"{type(self).__name__} must override row_weights")

    def cut(self, weights: Sequence[RowWeights], rank: int) -> Iterable[Minibatch]:
        """This rank's part of every minibatch, one by one. By default in the order of the partition: the producer has
        already shuffled by the tenant's seed. What is drawn comes from the tenant's random stream, alike on every rank:
        the caller is inside it, but not while the minibatch trains."""
        return cut_in_order(weights, -(-self.batch_size // len(weights)), rank)

    def loss(
        self, batch: TensorDict | None, jobs_completed: int, shares: dict[str, float] | None = None
    ) -> dict[str, Tensor]:
        """``loss`` and what is logged (scalars).

        Args:
            batch: ``[B]``, with features in float32; None only with :attr:`trains_without_rows`.
            jobs_completed: by the tenant so far.
            shares: what part of the whole minibatch's weight ``batch`` has, for every mean: the results are then this
                rank's summands. None: it is the whole minibatch.
        """
        raise NotImplementedError(f"{type(self).__name__} must override loss")

    def minibatches(self, data: TensorDict) -> Iterator[TensorDict]:
        """A job's minibatches with one rank."""
        data = self.counted(data)
        for part in self.cut([self.row_weights(data)], 0):
            if len(part.rows):
                yield rows_of(data, part.rows)
