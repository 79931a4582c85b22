"""The training queue: hand-out, acknowledgement, derived columns, budgets, no copies, close."""

import threading
import time

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from nexus_lightning.queues.jobs import JobState, Scheduler
from nexus_lightning.queues.training import QueueClosed, TrainingQueue

ROW_BYTES = 3 * 4 + 8


def partition(rows: int = 6) -> TensorDict:
    return TensorDict(
        {
            "observation": TensorDict({"state": torch.randn(rows, 3)}, [rows]),
            "language_instruction": NonTensorStack(*[f"task {i}" for i in range(rows)]),
            "index": torch.arange(rows),
        },
        [rows],
    )


@pytest.fixture
def queue() -> TrainingQueue:
    queue = TrainingQueue()
    queue.put("p", partition(), tenant_id="a")
    return queue


def test_rows_come_in_order_once_per_task(queue: TrainingQueue) -> None:
    for task in ("advantages", "train"):
        seen = []
        while (meta := queue.get_meta(["index"], 4, "p", task)) is not None:
            seen.append(queue.get_data(meta)["index"].tolist())
            queue.ack(meta)
        assert seen == [[0, 1, 2, 3], [4, 5]]
        assert queue.consumed("p", task) == 6
    assert queue.consumed("p", "nobody") == 0


def test_contiguous_rows_are_views_also_for_nested_fields(queue: TrainingQueue) -> None:
    source = partition()
    queue.put("q", source, tenant_id="a")
    queue.get_meta(["index"], 2, "q", "train")
    meta = queue.get_meta([("observation", "state"), "language_instruction"], 3, "q", "train")
    assert meta is not None and meta.rows == (2, 3, 4) and len(meta) == 3
    data = queue.get_data(meta)
    state = source["observation", "state"]
    assert data["observation", "state"].data_ptr() == state.data_ptr() + 2 * 3 * 4
    assert list(data["language_instruction"]) == ["task 2", "task 3", "task 4"]
    assert "index" not in data.keys() and data.batch_size == torch.Size([3])
    assert torch.equal(queue.get_data(meta)["observation", "state"], state[2:5]), "may be read again"


def test_a_name_above_the_leaves_means_all_of_them(queue: TrainingQueue) -> None:
    meta = queue.get_meta(["observation"], None, "p", "train")
    assert meta is not None and queue.get_data(meta)["observation", "state"].shape == (6, 3)


def test_nothing_is_consumed_before_ack_and_released_rows_come_back(queue: TrainingQueue) -> None:
    """Q3, data side."""
    first, second = (queue.get_meta(["index"], 2, "p", "train") for _ in range(2))
    assert first is not None and second is not None
    queue.ack(second)
    assert queue.consumed("p", "train") == 2
    assert queue.release("p", "other") == 0 and queue.release("p") == 2
    rows = []
    while (meta := queue.get_meta(["index"], 3, "p", "train")) is not None:
        rows += queue.get_data(meta)["index"].tolist()
        queue.ack(meta)
    assert rows == [0, 1, 4, 5]
    with pytest.raises(ValueError, match="acknowledged or released before"):
        queue.ack(first)
    with pytest.raises(ValueError, match="acknowledged or released before"):
        queue.put(TensorDict({"late": torch.zeros(2)}, [2]), metadata=first)
    assert queue.release("gone") == 0


def test_rows_that_are_not_contiguous_after_release(queue: TrainingQueue) -> None:
    metas = [queue.get_meta(["index"], 2, "p", "train") for _ in range(3)]
    queue.ack(metas[1])
    queue.release("p")
    meta = queue.get_meta(["index", "language_instruction"], None, "p", "train")
    assert queue.get_data(meta)["index"].tolist() == [0, 1, 4, 5]
    assert list(queue.get_data(meta)["language_instruction"]) == ["task 0", "task 1", "task 4", "task 5"]


def test_fields_that_are_not_there_yet(queue: TrainingQueue) -> None:
    assert queue.get_meta(["index", "advantage"], 6, "p", "train") is None
    half = queue.get_meta(["index"], 3, "p", "advantages")
    queue.put(TensorDict({"advantage": torch.ones(3), "target": {"value": torch.ones(3, 1)}}, [3]), metadata=half)
    assert queue.get_meta(["advantage"], 6, "p", "train") is None, "rows 3 to 5 are missing"
    early = queue.get_meta(["advantage"], 3, "p", "train")
    assert queue.get_data(early)["advantage"].tolist() == [1, 1, 1]
    rest = queue.get_meta(["index"], 3, "p", "advantages")
    queue.put(
        TensorDict({"advantage": torch.full((3,), 2.0), "target": {"value": torch.ones(3, 1)}}, [3]), metadata=rest
    )
    late = queue.get_meta(["advantage", ("target", "value")], 6, "p", "train")
    assert queue.get_data(late)["advantage"].tolist() == [2, 2, 2]


def test_whole_derived_columns_are_kept_by_reference_and_can_be_written_again(queue: TrainingQueue) -> None:
    meta = queue.get_meta(["index"], None, "p", "advantages")
    for value in (1.0, 2.0):
        column = torch.full((6,), value)
        queue.put(TensorDict({"advantage": column, "note": NonTensorStack(*"abcdef")}, [6]), metadata=meta)
    read = queue.get_data(queue.get_meta(["advantage", "note"], None, "p", "train"))
    assert read["advantage"].data_ptr() == column.data_ptr() and list(read["note"]) == list("abcdef")
    assert queue.used_bytes("a") == 6 * (ROW_BYTES + 4), "a column written again is charged once"


def test_bad_derived_columns_change_nothing(queue: TrainingQueue) -> None:
    meta = queue.get_meta(["index"], 2, "p", "advantages")
    for td, words in (
        (TensorDict({"index": torch.zeros(2)}, [2]), "index came with the partition"),
        (TensorDict({"x": torch.zeros(3)}, [3]), "2 rows are due"),
        (TensorDict({"x": torch.zeros(2), "note": NonTensorStack("a", "b")}, [2]), "note are not tensors"),
    ):
        with pytest.raises(ValueError, match=words) as caught:
            queue.put(td, metadata=meta)
        assert "tenant 'a'" in str(caught.value)
    queue.put(TensorDict({"x": torch.zeros(2)}, [2]), metadata=meta)
    with pytest.raises(ValueError, match=r"column x is torch.float32 \[\] per row"):
        queue.put(TensorDict({"y": torch.zeros(2), "x": torch.zeros(2, 2)}, [2]), metadata=meta)
    assert queue.get_meta(["y"], 2, "p", "train") is None
    assert queue.used_bytes() == 6 * (ROW_BYTES + 4)


def test_the_partition_is_fixed_when_put(queue: TrainingQueue) -> None:
    source = partition()
    queue.put("q", source, tenant_id="a")
    source["extra"] = torch.zeros(6)
    source["observation", "extra"] = torch.zeros(6)
    meta = queue.get_meta(["observation"], None, "q", "train")
    assert ("observation", "extra") not in queue.get_data(meta).keys(True)
    assert queue.get_meta(["extra"], None, "q", "train") is None


def test_clear_gives_bytes_back_and_forgets(queue: TrainingQueue) -> None:
    meta = queue.get_meta(["index"], 2, "p", "train")
    assert queue.used_bytes("a") == queue.used_bytes() == 6 * ROW_BYTES and queue.partitions("a") == ["p"]
    assert queue.clear("p") == 6 * ROW_BYTES and queue.clear("p") == 0
    assert queue.used_bytes("a") == 0 and queue.partitions() == []
    for call in (lambda: queue.get_data(meta), lambda: queue.ack(meta), lambda: queue.get_meta(["index"], 1, "p", "t")):
        with pytest.raises(ValueError, match="partition 'p' is not in the training queue"):
            call()
    queue.put("p", partition(), tenant_id="a")
    with pytest.raises(ValueError, match="acknowledged or released before"):
        queue.ack(meta)


def test_bad_puts_name_the_tenant(queue: TrainingQueue) -> None:
    with pytest.raises(ValueError, match="tenant 'a': partition 'p' exists already"):
        queue.put("p", partition(), tenant_id="a")
    with pytest.raises(ValueError, match="at least one row"):
        queue.put("q", TensorDict({"x": torch.zeros(0)}, [0]), tenant_id="a")
    with pytest.raises(TypeError, match="tenant_id"):
        queue.put("q", partition())
    queue.set_budget("a", 10)
    with pytest.raises(ValueError, match="more than the tenant's whole budget of 10"):
        queue.put("q", partition(), tenant_id="a")
    with pytest.raises(ValueError, match="max_bytes=0"):
        queue.set_budget("a", 0)
    with pytest.raises(ValueError, match="ask for something"):
        queue.get_meta([], 2, "p", "train")


def wait_until_blocked(thread: threading.Thread) -> None:
    time.sleep(0.05)
    assert thread.is_alive()


def test_budget_blocks_one_tenant_until_there_is_room() -> None:
    queue = TrainingQueue(max_bytes_per_tenant=10 * ROW_BYTES)
    queue.put("a1", partition(6), tenant_id="a")
    producer = threading.Thread(target=lambda: queue.put("a2", partition(6), tenant_id="a"), daemon=True)
    producer.start()
    wait_until_blocked(producer)
    queue.put("b1", partition(6), tenant_id="b")
    with pytest.raises(TimeoutError, match=r"tenant 'a'.*120 of 200 used"):
        queue.put("a3", partition(6), tenant_id="a", timeout_s=0.01)
    queue.clear("b1")
    wait_until_blocked(producer)
    queue.clear("a1")
    producer.join(10)
    assert queue.partitions() == ["a2"]


def test_derived_columns_are_charged_but_never_block() -> None:
    queue = TrainingQueue(max_bytes_per_tenant=6 * ROW_BYTES)
    queue.put("p", partition(6), tenant_id="a")
    queue.put(TensorDict({"x": torch.zeros(6)}, [6]), metadata=queue.get_meta(["index"], None, "p", "advantages"))
    assert queue.used_bytes("a") == 6 * (ROW_BYTES + 4)
    with pytest.raises(TimeoutError):
        queue.put("q", partition(1), tenant_id="a", timeout_s=0)
    queue.clear("p")
    queue.put("q", partition(1), tenant_id="a", timeout_s=0)


def test_close_wakes_blocked_producers() -> None:
    queue = TrainingQueue(max_bytes_per_tenant=6 * ROW_BYTES)
    queue.put("p", partition(6), tenant_id="a")
    errors = []

    def produce() -> None:
        try:
            queue.put("q", partition(6), tenant_id="a")
        except QueueClosed as error:
            errors.append(str(error))

    producer = threading.Thread(target=produce, daemon=True)
    producer.start()
    wait_until_blocked(producer)
    queue.close()
    producer.join(10)
    assert errors == ["tenant 'a': partition 'q': the training queue is closed"]
    queue.ack(queue.get_meta(["index"], None, "p", "train"))
    with pytest.raises(QueueClosed):
        queue.put("r", partition(1), tenant_id="a")


def test_with_the_scheduler_every_outcome_clears_the_partition() -> None:
    queue = TrainingQueue()
    scheduler = Scheduler(on_terminal=lambda job: queue.clear(job.partition_id))
    scheduler.register("a", "offline_rl", max_in_flight=5, max_policy_staleness=4)

    def produce(version: int):
        job = scheduler.reserve("a", 6, behavior_policy_version=version)
        queue.put(job.partition_id, partition(), tenant_id="a")
        return scheduler.mark(job.job_id, JobState.READY)

    stale, _, failed, left = (produce(version) for version in (0, 5, 5, 5))
    trained = scheduler.lease_next({"a": 5}, 0, 60)
    assert stale.partition_id not in queue.partitions()
    queue.ack(queue.get_meta(["index"], None, trained.partition_id, "train"))
    scheduler.complete(trained.job_id)
    scheduler.fail(failed.job_id, "why")
    assert queue.partitions() == [left.partition_id]
    scheduler.unregister("a")
    assert queue.used_bytes() == 0
