"""What the toy runs compute stays what it was: one test per algorithm, on one rank and on two.

On the machine of the recording (same CPU, kernels and versions of packages) the last payload of every run must agree
bit for bit: weights and normaliser, optimizer, random state, counters; and every logged number within 1e-6, because a
mean may be summed in another order. Elsewhere kernels round differently, and one bit changes all digests: there the
losses are compared within rtol 1e-4 (atol 1e-5), and the counters.

A change that is meant to change them says so in its commit; see record.py.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from dist.launch import run_ranks
from golden.runs import RUNS, machine, overrides, path_of


@pytest.fixture(scope="module")
def played(tmp_path_factory) -> dict[int, list[dict[str, Any]]]:
    """Number of ranks -> on each of them, name -> what the run gave."""
    folder: Path = tmp_path_factory.mktemp("golden")
    return {size: run_ranks("golden.runs:play", size, folder, *RUNS) for size in (1, 2)}


@pytest.mark.parametrize("size", [1, 2], ids=["one rank", "two ranks"])
@pytest.mark.parametrize("name", RUNS)
def test_it_computes_what_it_did(played, name, size):
    golden = json.loads(path_of(name).read_text())
    assert golden["overrides"] == overrides(name), "another run than the recorded one: record it"
    expected, first = golden["ranks"][str(size)], played[size][0][name]
    assert all(rank[name] == first for rank in played[size]), "every rank reads the same"
    same_machine = golden["machine"] == machine()
    if not same_machine:
        warnings.warn(f"{name} was recorded elsewhere: only losses and counters are compared", stacklevel=1)
    assert differences(expected, first, same_machine) == []


def differences(expected: dict[str, Any], got: dict[str, Any], same_machine: bool) -> list[str]:
    """A line for every golden value that is another one now."""
    lines = []
    for tenant in sorted({*expected["payloads"], *got["payloads"]}):
        then, now = (side["payloads"].get(tenant, {}) for side in (expected, got))
        for key in sorted({*then, *now}):
            if then.get(key) != now.get(key) and (same_machine or type(then.get(key)) is not str):
                lines.append(f"payload of {tenant}: {key} was {then.get(key)}, is {now.get(key)}")
    rel, abs = (1e-6, 1e-7) if same_machine else (1e-4, 1e-5)
    for column in sorted({*expected["columns"], *got["columns"]}):
        then, now = (side["columns"].get(column, []) for side in (expected, got))
        if (same_machine or column.endswith("loss")) and now != pytest.approx(then, rel=rel, abs=abs):
            lines.append(f"{column} was {then}, is {now}")
    return lines


def test_a_change_is_noticed_where_it_should_be():
    then = {"payloads": {"a": {"head": "00", "cursor": 3}}, "columns": {"train/a/loss": [1.0], "train/a/kl": [0.5]}}

    def changed(**values: Any) -> list[int]:
        """How many lines it gives on the same machine, and on another one."""
        now = {
            "payloads": {"a": then["payloads"]["a"] | values.pop("payload", {})},
            "columns": then["columns"] | {f"train/a/{key}": value for key, value in values.items()},
        }
        return [len(differences(then, now, same_machine)) for same_machine in (True, False)]

    assert changed() == [0, 0]
    assert changed(payload={"head": "01"}) == [1, 0], "a bit of the weights"
    assert changed(payload={"cursor": 4}) == [1, 1]
    assert changed(loss=[1.00005]) == [1, 0] and changed(loss=[1.001]) == [1, 1]
    assert changed(loss=[1.0, 1.0]) == changed(loss=[]) == [1, 1], "a row more, a row less"
    assert changed(kl=[0.6]) == changed(new=[0.0]) == [1, 0], "every other column is of this machine alone"
