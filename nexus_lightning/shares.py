"""Which rows of a tenant's global batch are this rank's, and what they weigh in its mean.

The global batch and its minibatches are those of a run with one rank. A rank holds a contiguous block of the rows::

    SFT: minibatch m of B rows      |  rank 0: ceil(B/W) rows  |  rank 1  | ... |  last: the rest + zero-weight rows |
    RL:  N simulators x L decisions |  rank 0: simulators 0 .. N/W-1      | ... |

PPO's minibatches are cut from one permutation of all the rows, drawn alike on every rank; a rank trains those of them
that it holds, so every minibatch has the rows it has with one rank, and no row travels.

The loss is the mean over the rows of the *global* minibatch: each rank multiplies its own mean by its share of what the
mean is taken over (``weight here / weight on all ranks``), and the gradients are summed. A mean of means never occurs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

#: How numbers that are no means come together.
REDUCTIONS: dict[str, Callable[..., Any]] = {"sum": sum, "max": max, "min": min}


@dataclass(frozen=True)
class Share:
    """Part ``index`` of ``count`` equal parts; ``index`` None: this rank has none.

    Example:
        >>> Share(1, 2).block(8), Share().block(8), Share(None, 2).block(8)
        ((4, 8), (0, 8), (0, 0))
    """

    index: int | None = 0
    count: int = 1

    def block(self, size: int) -> tuple[int, int]:
        """First and past-the-last of ``size`` things, which ``count`` must divide."""
        assert size % self.count == 0, "validated with the config"
        if self.index is None:
            return 0, 0
        return self.index * size // self.count, (self.index + 1) * size // self.count

    def padded_rows(self, batch_size: int) -> tuple[Tensor, Tensor]:
        """This rank's rows of a batch, ``ceil(batch_size / count)`` on every rank.

        Returns:
            Their places in the batch, int64, and which are padding, bool; padding repeats the batch's last row.

        Example:
            >>> [part.tolist() for part in Share(1, 2).padded_rows(5)]
            [[3, 4, 4], [False, False, True]]
        """
        assert self.index is not None
        size = -(-batch_size // self.count)
        rows = torch.arange(self.index * size, (self.index + 1) * size)
        return rows.clamp(max=batch_size - 1), rows >= batch_size


@dataclass(frozen=True)
class Minibatch:
    """This rank's part of one global minibatch.

    Attributes:
        rows: of the rank's own data, int64; may be empty.
        shares: name of a mean -> weight of the rows here over the weight of the whole minibatch, in [0, 1].
    """

    rows: Tensor
    shares: dict[str, float]


#: Name of a mean -> weight of every row ``[N]`` in it.
RowWeights = Mapping[str, Tensor]


def cut_in_order(weights: Sequence[RowWeights], batch_size: int, rank: int) -> list[Minibatch]:
    """Minibatch m is the m-th ``batch_size`` rows of every rank: the producers have cut the global batch and padded.

    One in which no rank's row counts is left out.
    """
    by_rank = [torch.stack([v.float() for v in w.values()]).sum(0) > 0 for w in weights]  # padding weighs nothing
    counts = by_rank[rank]
    cut = [r for r in torch.arange(len(counts)).split(batch_size) if any(bool(c[r].any()) for c in by_rank)]
    return [Minibatch(rows[counts[rows]], _shares(weights, [rows] * len(weights), rank)) for rows in cut]


def cut_permutation(
    weights: Sequence[RowWeights], permutations: Iterable[Tensor], batch_size: int, rank: int
) -> Iterator[Minibatch]:
    """Minibatches of permutations of all ranks' rows, those of rank 0 first; the next permutation when it is due.

    Example:
        >>> ones = [{"rows": torch.ones(2)}, {"rows": torch.ones(2)}]
        >>> cut = cut_permutation(ones, [torch.tensor([3, 0, 1, 2])], 3, rank=0)
        >>> [(part.rows.tolist(), round(part.shares["rows"], 2)) for part in cut]
        [([0, 1], 0.67), ([], 0.0)]
    """
    sizes = [len(next(iter(w.values()))) for w in weights]
    starts = torch.tensor([0, *sizes]).cumsum(0).tolist()
    for permutation in permutations:
        for rows in permutation.split(batch_size):
            by_rank = [rows[(rows >= a) & (rows < b)] - a for a, b in pairwise(starts)]
            yield Minibatch(by_rank[rank], _shares(weights, by_rank, rank))


def _shares(weights: Sequence[RowWeights], rows: Sequence[Tensor], rank: int) -> dict[str, float]:
    shares = {}
    for name in weights[rank]:
        sums = [float(w[name][r].double().sum()) for w, r in zip(weights, rows, strict=True)]
        shares[name] = sums[rank] / max(sum(sums), 1e-30)
    return shares


@dataclass(frozen=True)
class Moments:
    """Number, sum and sum of squares of one rank's values: enough for mean and deviation of all ranks' together."""

    n: int
    total: float
    squares: float

    @classmethod
    def of(cls, values: Tensor) -> Moments:
        values = values.double()
        return cls(values.numel(), float(values.sum()), float(values.square().sum()))

    @staticmethod
    def normalize(values: Tensor, parts: Sequence[Moments], floor: float = 1e-6) -> Tensor:
        """``(values - mean) / std`` over everybody's values, std at least ``floor``."""
        n = sum(part.n for part in parts)
        mean = sum(part.total for part in parts) / n
        variance = max(0.0, sum(part.squares for part in parts) / n - mean**2)
        return (values - mean) / max(variance**0.5, floor)


class Metric(NamedTuple):
    """One rank's value of a metric, and how those of all ranks come together.

    Attributes:
        value: here.
        reduction: ``mean`` (by weight), ``sum``, ``max`` or ``min``.
        weight: of a mean: how many things it was taken over.
    """

    value: float
    reduction: str
    weight: float = 1.0


def reduce_metrics(parts: Sequence[Mapping[str, Metric]]) -> dict[str, float]:
    """Metrics of all ranks -> one number each; a rank need not have all of them.

    Example:
        >>> reduce_metrics([{"steps": Metric(3, "sum"), "success": Metric(1.0, "mean", 1)}, {"steps": Metric(4, "sum"),
        ...     "success": Metric(0.5, "mean", 4), "longest": Metric(9, "max")}])
        {'steps': 7, 'success': 0.6, 'longest': 9}
    """
    reduced = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        metrics = [part[name] for part in parts if name in part]
        if metrics[0].reduction == "mean":
            reduced[name] = sum(m.value * m.weight for m in metrics) / sum(m.weight for m in metrics)
        else:
            reduced[name] = REDUCTIONS[metrics[0].reduction](m.value for m in metrics)
    return reduced


def rows_of(data: TensorDict, rows: Tensor) -> TensorDict:
    """``data[rows]``, without a copy when they are a run of neighbours."""
    first = int(rows[0])
    if bool((rows == torch.arange(first, first + len(rows))).all()):
        return data[first : first + len(rows)]
    return data[rows]
