"""The contract of an algorithm: one class, which a tenant names by ``_target_``, and its settings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, cast

import torch
from hydra.utils import get_class
from tensordict import TensorDict
from torch import Tensor, nn

from nexus_lightning.bounds import setting
from nexus_lightning.head import ActionHead
from nexus_lightning.schema import Normalizer
from nexus_lightning.shares import Metric, Minibatch, RowWeights, Share, cut_in_order, rows_of


@dataclass
class AlgorithmSettings:
    """What a tenant's ``algorithm`` holds; a subclass adds fields with defaults, bounds by :func:`setting`."""

    _target_: str = ""  # dotted path of the class, which Objective.configure fills in


@dataclass
class RolloutSettings(AlgorithmSettings):
    """What every algorithm of task rl is asked for."""

    chunks_per_job: int | None = setting(None, least=1)  # policy decisions per simulator and training job; required
    epochs: int = setting(4, least=1)  # over the rows of a job
    minibatch_size: int = setting(64, least=1)  # decisions per optimizer step
    sft_weight: float | None = setting(None, above=0)  # of the supervised loss on the tenant's `dataset`


class Recorded(Protocol):
    """A recording as an algorithm of task offline_rl reads it, frame by frame."""

    #: Steps of a chunk that are carried out.
    execute: int

    def returns_to_go(self, gamma: float) -> Tensor:
        """Discounted reward from every frame to the end of its episode, float32 ``[N, 1]``."""
        ...

    def transitions(self, gamma: float) -> TensorDict:
        """Every frame with the ``execute`` actions from it on as one decision ``[N]``: ``reward``, ``discount``,
        ``taken``, and ``next_row``, which makes batches hold ``next_features`` and ``next_state``."""
        ...


class Networks(nn.Module):
    """What :meth:`Objective.networks` gives; parameters that require a gradient are trained."""

    def update_slow(self) -> None:
        """After every optimizer step: slow copies follow, for example. By default nothing."""


class Objective:
    """What the jobs of one tenant minimise. The training step calls, for each job and on every rank::

        data     = objective.counted(data)                        # rows that train
        weights  = objective.row_weights(data)                    # told to the other ranks
        for part in objective.cut([weights of every rank], rank): # the same minibatches everywhere
            losses = objective.loss(data[part.rows], jobs_completed, part.shares)

    With one rank its shares are 1. Nothing here calls a collective.

    An algorithm is a subclass in any importable file and a YAML with its ``_target_``. It must declare :attr:`task` and
    override :meth:`minibatch_loss`; a task of rl also :meth:`advantages` (or subclass
    :class:`~nexus_lightning.objectives.policy_gradient.PolicyGradient`, which has all but the loss), one of offline_rl
    :meth:`columns`. Class methods are asked before a head exists, and with the settings alone.

    Args:
        head: the tenant's.
        normalizer: the tenant's.
        settings: of this class.
        batch_size: samples per optimizer step (``dataset.batch_size``), of all ranks together.
        networks: what :meth:`networks` gave, now owned by the tenant's slot.

    Example:
        Behaviour cloning that leaves errors within a margin alone, in ``mine.py``::

            @dataclass
            class MarginSettings(AlgorithmSettings):
                margin: float = setting(0.1, least=0)

            class Margin(SFT):
                settings_class = MarginSettings

                def minibatch_loss(self, batch, jobs_completed):
                    losses = super().minibatch_loss(batch, jobs_completed)
                    return {"loss": (losses["loss"] - self.settings.margin).relu()}
    """

    #: What it trains: ``rl`` (rollouts), ``offline_rl`` (recordings with rewards) or ``sft`` (demonstrations).
    task: ClassVar[str] = ""
    #: A tenant of this task that names no algorithm has it.
    default: ClassVar[bool] = False
    #: Dataclass of its settings: defaults, types and bounds.
    settings_class: ClassVar[type[AlgorithmSettings]] = AlgorithmSettings
    #: Columns of a job's partition besides the observation or its features.
    fields: ClassVar[tuple[str, ...]] = ()
    #: What the means in :meth:`loss` are taken over, by name; :meth:`row_weights` has one tensor for each.
    means: tuple[str, ...] = ("loss",)
    #: How what :meth:`loss` gives comes together over minibatches and ranks: ``mean``, ``sum``, ``max`` or ``min``.
    #: What is not named is a mean over the rows.
    metrics: Mapping[str, str] = {}
    #: Arrays of a low-level ``forward_backward`` beside the observation (services); ``?`` may be left out. Without any
    #: it is not offered there.
    arrays: ClassVar[tuple[str, ...]] = ()
    #: rl: the rollout brings the critic's values, ``state_value`` and ``bootstrap``.
    needs_critic: ClassVar[bool] = False
    #: offline_rl: the recording must tell an episode that ended from one that was cut.
    needs_ends: ClassVar[bool] = False
    #: Observations are encoded once per job (several epochs read them), not minibatch by minibatch.
    encode_whole_job = False
    #: The step normalises the column ``advantage`` over the rows of all ranks.
    normalizes_advantages = False
    #: A rank without a row of a minibatch calls :meth:`loss` all the same, with None.
    trains_without_rows = False
    settings: Any  # of `settings_class`
    #: Samples of a minibatch, of all ranks together.
    batch_size: int

    def __init__(
        self,
        head: ActionHead,
        normalizer: Normalizer,
        settings: AlgorithmSettings,
        batch_size: int = 1,
        networks: Networks | None = None,
    ) -> None:
        self.head, self.normalizer, self.settings, self.batch_size = head, normalizer, settings, batch_size
        self.critic = networks

    # --------------------------------------------------------------------------- asked of the class, with settings

    @classmethod
    def configure(cls, **settings: Any) -> Any:
        """Settings of this algorithm, as its YAML makes them."""
        return cls.settings_class(f"{cls.__module__}.{cls.__qualname__}", **settings)

    @classmethod
    def problems(cls, key: str, tenant: Any, head: Any) -> list[str]:
        """What this algorithm cannot do with a tenant, one line each; types and bounds are checked before.

        Args:
            key: of the tenant, such as ``tenants.toy``: lines begin with it.
            tenant: the :class:`~nexus_lightning.config.TenantConfig`; ``tenant.algorithm`` are the settings.
            head: class of its head, or None when that cannot be imported.
        """
        del key, tenant, head
        return []

    @classmethod
    def job_fields(cls, settings: Any) -> tuple[str, ...]:
        """Columns of a job's partition that :meth:`loss` reads, besides the observation or its features."""
        del settings
        return cls.fields

    @classmethod
    def networks(cls, head: ActionHead, settings: Any) -> Networks | None:
        """Networks beside the head that the tenant's slot owns: saved and optimised with it (at ``value_lr``), never
        served."""
        del head, settings
        return None

    @classmethod
    def has_networks(cls) -> bool:
        """Whether :meth:`networks` gives some."""
        return cls.networks.__func__ is not Objective.networks.__func__  # pyright: ignore[reportFunctionMemberAccess]

    @classmethod
    def build(
        cls,
        head: ActionHead,
        normalizer: Normalizer,
        settings: Any,
        batch_size: int,
        networks: Networks | None,
        draw: Callable[[int], TensorDict],
        share: Share,
    ) -> Objective:
        """The tenant's objective; ``draw`` gives the next demonstrations of an rl tenant that has a dataset, ``share``
        says which of them are this rank's."""
        del draw, share
        return cls(head, normalizer, settings, batch_size, networks)

    # ------------------------------------------------------------------------ of rl: from a rollout to training data

    @classmethod
    def waits_for_actor(cls, settings: Any) -> bool:
        """Whether :meth:`actor_forward` is due, right before a job trains."""
        del settings
        return False

    @classmethod
    def group_size(cls, settings: Any) -> int:
        """How many neighbouring simulators start from the same initial state."""
        del settings
        return 1

    @classmethod
    def ended(cls, following: TensorDict, settings: Any) -> Tensor:
        """After which decisions an episode is worth nothing more, bool ``[N, L, 1]``."""
        del settings
        return following["terminated"]

    @classmethod
    def advantages(cls, rollout: TensorDict, settings: Any) -> TensorDict:
        """Derived columns ``[N, L]`` of a rollout (simulators x decisions), of this rank's simulators.

        Args:
            rollout: ``("next", "reward"|"done"|"terminated"|"executed")``, ``("vla_action", "log_probs")``,
                ``episode_seed``; with :attr:`needs_critic` also ``state_value`` and ``("next", "state_value")``
                ``[N, L, 1]`` (zero where :meth:`ended`, the critic's estimate where truncated or cut).
            settings: of the tenant.
        """
        raise NotImplementedError(f"{cls.__name__} must override advantages")

    @classmethod
    def rollout_metrics(cls, rollout: TensorDict, settings: Any) -> dict[str, Metric]:
        """What it says of a rollout ``[N, L]``, beside what is said of every one."""
        del rollout, settings
        return {}

    def actor_forward(self, batch: TensorDict) -> TensorDict:
        """How the present policy sees rows of a rollout (with features): derived columns."""
        raise NotImplementedError(f"{type(self).__name__} must override actor_forward")

    # ---------------------------------------------------------------------------------------------- of offline_rl

    @classmethod
    def columns(cls, recorded: Recorded, settings: Any) -> TensorDict:
        """Columns ``[N]`` that the batches of a recording get, one row for each of its frames."""
        raise NotImplementedError(f"{cls.__name__} must override columns")

    # -------------------------------------------------------------------------------------------------- the step

    def counted(self, data: TensorDict) -> TensorDict:
        """The rows that train."""
        return data

    def row_weights(self, data: TensorDict) -> dict[str, Tensor]:
        """Name of a mean -> what every row weighs in it, ``[N]``. By default 1, and 0 where no step is valid: such rows
        pad the batch of several ranks."""
        if "is_pad" in data.keys():
            return {"loss": ~cast(Tensor, data["is_pad"]).all(-1)}
        return {"loss": torch.ones(len(data))}

    def cut(self, weights: Sequence[RowWeights], rank: int) -> Iterable[Minibatch]:
        """This rank's part of every minibatch, one by one. By default in the order of the partition: the producer has
        already shuffled by the tenant's seed. What is drawn comes from the tenant's random stream, alike on every rank:
        the caller is inside it, but not while the minibatch trains."""
        return cut_in_order(weights, -(-self.batch_size // len(weights)), rank)

    def warming_up(self, jobs_completed: int) -> bool:
        """Whether the critic alone is trained."""
        del jobs_completed
        return False

    def loss(
        self, batch: TensorDict | None, jobs_completed: int, shares: dict[str, float] | None = None
    ) -> dict[str, Tensor]:
        """``loss`` and what is logged (scalars), each to be reduced over the ranks as :attr:`metrics` says.

        Args:
            batch: ``[B]``, with features in float32; None only with :attr:`trains_without_rows`.
            jobs_completed: by the tenant so far.
            shares: what part of the whole minibatch's weight ``batch`` has, for every mean: means are then this rank's
                summands. None: it is the whole minibatch.
        """
        assert batch is not None
        losses = self.minibatch_loss(batch, jobs_completed)
        if shares is None:
            return losses
        of_rows = [name for name in losses if self.metrics.get(name, "mean") == "mean"]
        return losses | {name: losses[name] * shares["loss"] for name in of_rows}

    def minibatch_loss(self, batch: TensorDict, jobs_completed: int) -> dict[str, Tensor]:
        """``loss`` and what is logged (scalars) of the rows in ``batch`` ``[B]``, means over them."""
        raise NotImplementedError(f"{type(self).__name__} must override minibatch_loss")

    def minibatches(self, data: TensorDict) -> Iterator[TensorDict]:
        """A job's minibatches with one rank."""
        data = self.counted(data)
        for part in self.cut([self.row_weights(data)], 0):
            if len(part.rows):
                yield rows_of(data, part.rows)


@functools.cache
def _class(target: str) -> type[Objective]:
    return get_class(target)


def algorithm_class(settings: AlgorithmSettings) -> type[Objective]:
    """The class that validated settings are of."""
    return _class(settings._target_)
