"""What the routes read and answer: every key typed, every length and number bounded, unknown keys refused.

The models see the ``meta`` of a body (:mod:`nexus_lightning.services.codec`); arrays travel beside it. What a tenant
spec may say inside ``schema``, ``head``, ``dataset`` and ``environment`` depends on the operator's registry and is
checked by the master; here only its form is bounded.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StringConstraints

#: Also of ids that clients choose.
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9 _.:-]{0,63}$")]
Id = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_./:-]{0,199}$")]
Text = Annotated[str, StringConstraints(max_length=2000)]
Seed = Annotated[int, Field(ge=0, le=2**62)]
Version = Annotated[int, Field(ge=0, le=2**53)]
Object = Annotated[dict[str, JsonValue], Field(max_length=64)]


class Body(BaseModel):
    """Of a request: unknown keys are errors, no value is converted ("5" is no number)."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Named(BaseModel):
    """An entry of the operator's registry and what the spec sets of it."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    name: Name


class Environment(Named):
    """Which environment, its arguments, and how many simulators at once."""

    num_envs: int | None = Field(None, ge=1, le=256)


def _example(**value: Any) -> ConfigDict:
    return ConfigDict(json_schema_extra={"example": value})


# ------------------------------------------------------------------------------------------------------------- tenants

TOY_SCHEMA = {
    "cameras": ["camera"],
    "image_size": 32,
    "state_dim": 4,
    "action_dim": 2,
    "chunk": 2,
    "execute": 2,
    "action_convention": "absolute",
    "rotation": "none",
    "gripper": "none",
}


class TenantSpec(Body):
    """A policy to be trained: its schema, its head, its share of the machine."""

    model_config = _example(name="arm-a", schema=TOY_SCHEMA, head={"name": "mlp", "hidden_dim": 64}, seed=1)
    name: Name
    schema_: Object = Field(alias="schema", description="keys of a tenant's `schema`, as in conf/tenant/*.yaml")
    head: Named
    seed: Seed | None = None
    priority: int | None = Field(None, ge=-100, le=100)
    weight: float | None = Field(None, gt=0, le=1000)
    max_in_flight: int | None = Field(None, ge=1, le=64)
    max_policy_staleness: int | None = Field(None, ge=0, le=1000)


class Workload(Body):
    """A piece of work for a tenant; at most one training workload of a tenant at a time."""

    model_config = _example(task="sft", dataset={"name": "toy"}, target_jobs=20)
    task: Literal["sft", "rl", "offline_rl", "eval"]
    dataset: Named | None = None
    environment: Environment | None = None
    algorithm: Object | None = None
    features: Object | None = None
    eval: Object | None = None
    target_jobs: int | None = Field(None, ge=1, le=10_000_000)


class Evaluate(Body):
    """Episodes of the policy at one version."""

    model_config = _example(environment={"name": "toy"}, episodes=20, first_seed=0, num_envs=2)
    environment: Environment | None = None
    episodes: int = Field(ge=1, le=10_000)
    first_seed: int = Field(0, ge=0, le=2**31)
    num_envs: int = Field(1, ge=1, le=256)
    policy_version: Version | None = None


class Empty(Body):
    """No keys."""


# ------------------------------------------------------------------------------------------------------------ training


class Options(Body):
    """Of an optimizer step; null: the head's own setting."""

    lr: float | None = Field(None, ge=0, le=10)
    grad_clip_norm: float | None = Field(None, gt=0, le=1e6)


class Batch(Body):
    """Beside the arrays of a batch: ``observation/state`` [B, S], ``observation/image/<camera>`` [B, 3, H, W] uint8,
    ``action`` [B, T, A], optionally ``mask`` and what the loss needs (``advantage`` [B] ...)."""

    model_config = _example(instructions=["push the cube"], loss="sft")
    instructions: list[Text] = Field(default_factory=list, max_length=4096)
    loss: Name = "sft"
    loss_options: Object = Field(default_factory=dict)


class TrainBatch(Batch):
    """A batch and the step that follows."""

    model_config = _example(instructions=["push the cube"], loss="sft", options={"lr": 1e-3})
    options: Options = Field(default_factory=lambda: Options(lr=None, grad_clip_norm=None))


class TrainJob(Body):
    """A job of the scheduler whose partition is ready."""

    model_config = _example(job_id="8c5a3f00-00000001")
    job_id: Id


class Load(Body):
    """A version that the server has, or (null) the parameters that travel as arrays."""

    model_config = _example(version=12)
    version: Version | None = None


# ----------------------------------------------------------------------------------------------------------- inference


class Predict(Body):
    """Beside ``observation/state`` [B, S] and ``observation/image/<camera>`` [B, 3, H, W] uint8."""

    model_config = _example(instructions=["push the cube"], deterministic=True)
    instructions: list[Text] = Field(max_length=4096)
    deterministic: bool = True
    policy_version: Version | None = None
    seed: Seed | None = None


class Rollout(Evaluate):
    """Episodes whose transitions come back."""

    model_config = _example(environment={"name": "toy"}, episodes=2, num_envs=2)
    deterministic: bool = False


class LoadWeights(Body):
    """The version that predictions shall use."""

    model_config = _example(version=12)
    version: Version


# -------------------------------------------------------------------------------------------------- queue and scheduler


class Delivery(Body):
    """Rows of a partition that were handed to a consumer."""

    partition_id: Id
    fields: list[Id] = Field(max_length=256)
    rows: list[Annotated[int, Field(ge=0, le=2**31)]] = Field(max_length=1_000_000)
    task_name: Name
    delivery: int = Field(ge=0, le=2**53)


class QueuePut(Body):
    """A new partition of rows, or (with ``metadata``) derived columns of rows handed out before."""

    model_config = _example(partition_id="demo-1")
    partition_id: Id | None = None
    metadata: Delivery | None = None


class QueueGetMeta(Body):
    """The next rows for a consumer; each ``task_name`` has its own progress."""

    model_config = _example(partition_id="demo-1", fields=["action"], batch_size=32, task_name="train")
    partition_id: Id
    fields: list[Id] = Field(min_length=1, max_length=256)
    batch_size: int | None = Field(None, ge=1, le=1_000_000)
    task_name: Name


class QueueGet(Body):
    """The rows of a delivery."""

    model_config = _example(
        metadata={"partition_id": "demo-1", "fields": ["action"], "rows": [0, 1], "task_name": "train", "delivery": 1}
    )
    metadata: Delivery


class QueueClear(Body):
    """A partition that is no longer needed."""

    model_config = _example(partition_id="demo-1")
    partition_id: Id


class Reserve(Body):
    """A job, to be filled."""

    model_config = _example(sample_count=32)
    sample_count: int = Field(ge=1, le=10_000_000)
    behavior_policy_version: Version | None = None
    domain: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{0,64}$")] = ""
    metadata: Object = Field(default_factory=dict)


class Mark(Body):
    """A job goes on to its next state."""

    model_config = _example(job_id="8c5a3f00-00000001", state="ready")
    job_id: Id
    state: Literal["needs_actor_forward", "needs_advantages", "ready"]
    lease_id: int | None = Field(None, ge=0, le=2**53)
    metadata: Object = Field(default_factory=dict)


class LeaseNext(Body):
    """The next ready job of this tenant."""

    model_config = _example(deadline_s=60.0)
    deadline_s: float = Field(600.0, gt=0, le=86_400)


class Complete(Body):
    """A leased job is done."""

    model_config = _example(job_id="8c5a3f00-00000001", lease_id=1)
    job_id: Id
    lease_id: int | None = Field(None, ge=0, le=2**53)
    metadata: Object = Field(default_factory=dict)


class Fail(Body):
    """A job is given up."""

    model_config = _example(job_id="8c5a3f00-00000001", reason="simulator died")
    job_id: Id
    reason: Text
    lease_id: int | None = Field(None, ge=0, le=2**53)


# -------------------------------------------------------------------------------------------------------- environments


class OpenSession(Body):
    """A simulator for one client; the lease is renewed by every call."""

    model_config = _example(environment={"name": "toy"}, lease_s=60.0)
    environment: Named
    tenant_id: Id | None = None
    seed: Seed | None = None
    lease_s: float | None = Field(None, gt=0, le=3600)


class Reset(Body):
    """Start an episode."""

    model_config = _example(seed=0)
    seed: Seed


class Step(Body):
    """Beside ``action`` [A], or ``actions`` [T, A] of batch_step; the same number again gives the same answer."""

    model_config = _example(request_seq=1)
    request_seq: int = Field(ge=0, le=2**53)


# ------------------------------------------------------------------------------------------------- futures and operator


class Retrieve(Body):
    """Several futures in one call: answers as soon as one of them has ended."""

    model_config = _example(future_ids=["f" + "0" * 32], wait_s=30.0)
    future_ids: list[Id] = Field(min_length=1, max_length=256)
    wait_s: float = Field(0.0, ge=0, le=60)


class NewToken(Body):
    """A token; the owner is made when the name is new."""

    model_config = _example(owner="alice", role="tenant")
    owner: Name
    role: Literal["tenant", "operator"] = "tenant"


# ------------------------------------------------------------------------------------------------------------- answers


class Answer(BaseModel):
    """Of an answer: more keys may come with later versions."""

    model_config = ConfigDict(extra="allow")


class ErrorBody(Answer):
    type: str
    message: str
    details: list[str]
    retryable: bool
    retry_after_s: float | None = None


class ErrorAnswer(Answer):
    """Every answer with status >= 400."""

    error: ErrorBody


class Ticket(Answer):
    """An accepted request."""

    future_id: str
    tenant_id: str
    seq: int
    status: Literal["pending", "running", "completed", "failed", "cancelled"]
    workload_id: str | None = None


class FutureError(Answer):
    type: str
    category: Literal["user", "server", "unknown"]
    message: str
    details: list[str]
    retryable: bool


class Future(Ticket):
    """``data_bytes`` > 0: arrays wait at ``/v1/futures/{future_id}/data``."""

    verb: str
    queue_state: str
    result: dict[str, Any] | None = None
    error: FutureError | None = None
    data_bytes: int = 0


class TenantAnswer(Answer):
    """A tenant as the master describes it, and what the service knows."""

    tenant_id: str
    name: str
    state: str
    next_seq: int


class WorkloadAnswer(Answer):
    workload_id: str
    future_id: str
    status: str


class TokenAnswer(Answer):
    token_id: str
    owner: str
    role: str
    token: str | None = Field(None, description="only in the answer that makes it")
