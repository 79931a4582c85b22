"""Tenant payloads: round trip, damage, kill, disk full, pruning."""

import errno
import json
import os
import signal
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from nexus_lightning import checkpoint
from nexus_lightning.checkpoint import (
    DamagedPayload,
    PayloadError,
    load_into,
    read_newest,
    read_payload,
    resolve_payload,
    tensors_digest,
    write_payload,
)

MANIFEST = {
    "schema": {"cameras": ["agentview"], "state_normalization": "mean_std"},
    "signature": "s" * 64,
    "prefix_signature": "p" * 64,
    "backbone_fingerprint": "b" * 64,
    "config": {"lr": 1e-3},
    "task": "sft",
}


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)
        self.low = nn.Parameter(torch.randn(4, dtype=torch.bfloat16))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("transposed", torch.randn(2, 3).T)


def trained(steps: int = 2) -> tuple[Module, torch.optim.Optimizer]:
    module = Module()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, betas=(0.8, 0.9))
    for _ in range(steps):
        optimizer.zero_grad()
        (module.head(torch.randn(5, 3)).square().mean() + module.low.float().sum()).backward()
        optimizer.step()
    return module, optimizer


def save(root: Path, version: int = 1, module: nn.Module | None = None, **changes) -> Path:
    if module is None:
        module, optimizer = trained()
        changes.setdefault("optimizer", optimizer.state_dict())
    arguments = dict(
        tensors=module.state_dict(),
        optimizer={"state": {}, "param_groups": []},
        state={"cursor": version, "lr": {"last_epoch": 3, "values": [0.1, None]}},
        manifest=MANIFEST,
    )
    return write_payload(root, "libero", version, **(arguments | changes))


def names(root: Path) -> list[str]:
    return sorted(p.name for p in (root / "libero").iterdir())


def test_round_trip_of_everything(tmp_path: Path) -> None:
    """C1, storage side: the next optimizer step from the payload equals the unbroken one, bit for bit."""
    module, optimizer = trained()
    generator = torch.Generator().manual_seed(3)
    path = save(tmp_path, 12, module, optimizer=optimizer.state_dict(), rng=generator.get_state())
    assert path == tmp_path / "libero" / "v00000012" and (tmp_path / "libero/latest").read_text() == "v00000012\n"
    assert sorted(p.name for p in path.iterdir()) == [
        "head.safetensors",
        "manifest.json",
        "optimizer.safetensors",
        "state.json",
    ]
    payload = read_payload(tmp_path / "libero", expected_keys=module.state_dict())
    assert payload.version == 12 and payload.tenant == "libero" and payload.path == path
    assert payload.state == {"cursor": 12, "lr": {"last_epoch": 3, "values": [0.1, None]}}
    assert payload.manifest["task"] == "sft" and payload.manifest["schema"] == MANIFEST["schema"]
    assert payload.manifest["tensors_digest"] == tensors_digest(module.state_dict()) == tensors_digest(payload.tensors)
    assert payload.manifest["created"].endswith("+00:00")

    other, other_optimizer = trained(steps=0)
    load_into(other, payload)
    other_optimizer.load_state_dict(payload.optimizer)
    other_generator = torch.Generator()
    other_generator.set_state(payload.rng)
    for m, o, g in ((module, optimizer, generator), (other, other_optimizer, other_generator)):
        o.zero_grad()
        (m.head(torch.randn(5, 3, generator=g)).square().mean() + m.low.float().sum()).backward()
        o.step()
    assert tensors_digest(module.state_dict()) == tensors_digest(other.state_dict())


def test_payload_without_optimizer_state_and_with_plain_values(tmp_path: Path) -> None:
    optimizer = {
        "state": {0: {"count": 3, "slow": torch.ones(2), "a.b": torch.zeros(1)}, 4: {"name": "x"}},
        "param_groups": [{"lr": float("nan"), "betas": (0.9, 0.99), "params": [0, 4], "fused": True}],
    }
    back = read_payload(save(tmp_path, 0, Module(), optimizer=optimizer))
    assert back.optimizer["state"].keys() == {0, 4} and back.optimizer["state"][4] == {"name": "x"}
    assert back.optimizer["state"][0]["count"] == 3 and back.optimizer["state"][0]["a.b"].tolist() == [0]
    assert back.optimizer["param_groups"][0]["betas"] == [0.9, 0.99] and back.rng is None
    assert read_payload(save(tmp_path, 1, Module())).optimizer == {"state": {}, "param_groups": []}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(tensors={}), "no tensors"),
        (dict(tensors={"a": 3}), "not tensors: a"),
        (dict(tensors={"a": torch.ones(1)}, expected_keys=["b"]), "missing keys: b; unexpected keys: a"),
        (dict(optimizer={"state": {}}), "with state and param_groups"),
        (dict(optimizer={"state": {"w": {}}, "param_groups": []}), "counted by integers"),
        (dict(optimizer={"state": {0: {"a": {1, 2}}}, "param_groups": []}), "not JSON"),
        (dict(state={"rng": torch.zeros(1)}), "state holds a value that is not JSON"),
        (dict(state={"milestones": {3: 1}}), "state read back differently"),
        (dict(rng=torch.zeros(3)), "uint8"),
        (dict(manifest={"task": "sft"}), "the manifest lacks schema, signature"),
        (dict(manifest=MANIFEST | {"policy_version": 7}), "policy_version=7: must be 1"),
        (dict(version=-1), "version -1"),
        (dict(keep=0), "keep=0"),
    ],
)
def test_what_cannot_be_saved(tmp_path: Path, changes: dict, words: str) -> None:
    """C2, at save: the message names the tenant, nothing is left behind, the previous version stays."""
    save(tmp_path, 0, Module())
    with pytest.raises(PayloadError, match=words) as caught:
        save(tmp_path, module=Module(), **changes)
    assert "tenant 'libero'" in str(caught.value)
    assert names(tmp_path) == ["latest", "v00000000"] and read_payload(tmp_path / "libero").version == 0


@pytest.mark.parametrize("tenant", ["", "../x", "a/b", "1a", "a" * 65, "a.b", "a\n", None])
def test_tenant_names_cannot_leave_the_root(tmp_path: Path, tenant: str) -> None:
    with pytest.raises(PayloadError, match="use a letter"):
        write_payload(tmp_path, tenant, 1, tensors={"a": torch.ones(1)}, optimizer={}, state={}, manifest=MANIFEST)
    assert list(tmp_path.iterdir()) == []


def test_a_link_cannot_lead_out_of_the_root(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "libero").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PayloadError, match="must not be links"):
        save(tmp_path / "root")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_load_errors_list_every_key_and_change_nothing(tmp_path: Path) -> None:
    """C2, at load."""
    payload = read_payload(save(tmp_path))
    with pytest.raises(PayloadError, match=r"missing keys: extra; unexpected keys: count, .*low"):
        read_payload(payload.path, expected_keys=["head.weight", "head.bias", "extra"])
    wrong = Module()
    wrong.head = nn.Linear(3, 5)
    wrong.low = nn.Parameter(torch.zeros(4))
    before = tensors_digest(wrong.state_dict())
    with pytest.raises(PayloadError) as caught:
        load_into(wrong, payload)
    for words in (
        "head.weight: torch.float32 [2, 3] in the payload",
        "low: torch.bfloat16",
        "tenant 'libero'",
        "Module",
    ):
        assert words in str(caught.value)
    with pytest.raises(PayloadError, match="missing keys: bias, weight"):
        load_into(nn.Linear(1, 1), payload)
    assert tensors_digest(wrong.state_dict()) == before


@pytest.mark.parametrize("name", ["head.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
def test_damage_is_found(tmp_path: Path, name: str) -> None:
    path = save(tmp_path)
    data = bytearray((path / name).read_bytes())
    data[len(data) // 2] ^= 0xFF
    (path / name).write_bytes(data)
    with pytest.raises(PayloadError, match=name):
        read_payload(path)
    (path / name).unlink()
    with pytest.raises(PayloadError):
        read_payload(path)


def test_a_damaged_version_names_the_newest_intact_one_which_can_be_read_instead(tmp_path: Path) -> None:
    folder = tmp_path / "libero"
    for version in (1, 2, 3, 4):
        save(tmp_path, version)
    assert read_newest(folder)[0].version == 4 and read_newest(tmp_path / "nobody") == (None, [])
    damage = {4: "head.safetensors", 3: "manifest.json"}
    for version, name in damage.items():
        file = folder / f"v{version:08d}" / name
        file.write_bytes(file.read_bytes()[:-7])
    for path in (folder, folder / "v00000004", folder / "v00000003"):
        with pytest.raises(DamagedPayload, match="newest intact version beside it is v00000002"):
            read_payload(path)
    payload, damaged = read_newest(folder)
    assert payload.version == 2 and payload.path == folder / "v00000002"
    assert [name in line for name, line in zip(damage.values(), damaged, strict=True)] == [True, True]
    assert "v00000004" in damaged[0] and "v00000003" in damaged[1] and "beside" not in "".join(damaged)
    (folder / "v00000004" / "manifest.json").unlink()
    for path in (folder, folder / "v00000004"):
        with pytest.raises(DamagedPayload, match="newest intact version beside it is v00000002"):
            resolve_payload(path)
    (folder / "latest").write_text("")  # what a power cut may leave of it
    with pytest.raises(DamagedPayload, match=r"not a version folder.*newest intact version beside it is v00000002"):
        read_payload(folder)
    assert read_newest(folder)[0].version == 2
    save(tmp_path, 5)
    assert read_payload(folder).version == 5, "the next save puts it right"
    for version in (1, 2, 5):
        (folder / f"v{version:08d}" / "state.json").write_text("{}")
    with pytest.raises(DamagedPayload, match="no version beside it is intact"):
        read_payload(folder)
    payload, damaged = read_newest(folder)
    assert payload is None and len(damaged) == 5


def test_resolve(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    assert resolve_payload(path) == resolve_payload(str(tmp_path / "libero")) == path
    with pytest.raises(PayloadError, match="no such folder"):
        resolve_payload(tmp_path / "nobody")
    with pytest.raises(PayloadError, match="neither a payload nor"):
        resolve_payload(tmp_path)
    for text, words in (("v00000009", "is not there; versions here: v00000003"), ("../../x", "not a version folder")):
        (tmp_path / "libero" / "latest").write_text(text)
        with pytest.raises(PayloadError, match=words):
            resolve_payload(tmp_path / "libero")


def test_digest_sees_names_types_shapes_and_bytes() -> None:
    base = {"a": torch.zeros(2, 2)}
    others = [
        {"b": torch.zeros(2, 2)},
        {"a": torch.zeros(4)},
        {"a": torch.zeros(2, 2, dtype=torch.int32)},
        {"a": -torch.zeros(2, 2)},
        base | {"b": torch.zeros(0)},
        {},
    ]
    digests = [tensors_digest(t) for t in [base, *others]]
    assert len(set(digests)) == len(digests)
    values = torch.randn(3, 5, dtype=torch.bfloat16)
    assert tensors_digest({"a": values}) == tensors_digest({"a": values.T.contiguous().T.requires_grad_()})


def test_saving_a_version_again(tmp_path: Path) -> None:
    """The same content is one folder; a moved cursor gets its own, and the first stays as it was."""
    module = Module()
    first = save(tmp_path, 1, module)
    assert save(tmp_path, 1, module) == first and names(tmp_path) == ["latest", "v00000001"]
    second = save(tmp_path, 1, module, state={"cursor": 99})
    assert second.name == "v00000001-r1" and read_payload(tmp_path / "libero").state == {"cursor": 99}
    assert read_payload(first).state["cursor"] == 1
    assert save(tmp_path, 1, module) == first == resolve_payload(tmp_path / "libero"), "latest follows the last save"
    (first / "state.json").write_text("{}")
    assert save(tmp_path, 1, module).name == "v00000001-r2", "a damaged folder is not the same content"


def test_pruning_spares_latest_and_pinned(tmp_path: Path) -> None:
    module = Module()
    for version in range(5):
        save(tmp_path, version, module, keep=2, pinned=[1])
    assert names(tmp_path) == ["latest", "v00000001", "v00000003", "v00000004"]
    save(tmp_path, 2, module, keep=1)
    assert names(tmp_path) == ["latest", "v00000002", "v00000004"]
    assert read_payload(tmp_path / "libero").version == 2


POINTS = ["first file", "before verify", "before rename", "after rename", "before latest", "after latest"]


def break_at(monkeypatch: pytest.MonkeyPatch, point: str, act) -> None:
    """Calls ``act`` at one point of the next save."""

    def before(owner, name: str) -> None:
        monkeypatch.setattr(owner, name, lambda *a, **k: act())

    def after(owner, name: str) -> None:
        real = getattr(owner, name)

        def then_act(*args, **kwargs):
            real(*args, **kwargs)
            act()

        monkeypatch.setattr(owner, name, then_act)

    if point == "first file":
        before(checkpoint.os, "fsync")
    elif point == "before verify":
        before(checkpoint, "_verify")
    elif point in ("before rename", "after rename"):
        (before if point == "before rename" else after)(checkpoint.os, "rename")
    else:
        (before if point == "before latest" else after)(checkpoint.os, "replace")


@pytest.mark.parametrize("point", POINTS)
def test_kill_9_in_mid_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    """C3: a killed save leaves a loadable version in force, and the next save tidies up."""
    module, newer = Module(), Module()
    save(tmp_path, 1, module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads: the child only writes files
        child = os.fork()
    if child == 0:
        try:
            break_at(monkeypatch, point, lambda: os.kill(os.getpid(), signal.SIGKILL))
            save(tmp_path, 2, newer)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    back = read_payload(tmp_path / "libero")
    expected = (2, newer) if point == "after latest" else (1, module)
    assert (back.version, tensors_digest(back.tensors)) == (expected[0], tensors_digest(expected[1].state_dict()))
    assert read_payload(save(tmp_path, 3, newer)).version == 3
    assert not [name for name in names(tmp_path) if name.startswith(".")]


@pytest.mark.parametrize("point", POINTS[:5])
def test_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    """C3: a clear error, the previous version in force, nothing left behind; a later save works."""
    module = Module()
    save(tmp_path, 1, module)

    def full():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        break_at(patch, point, full)
        with pytest.raises(
            OSError, match=r"tenant 'libero' version 2 was not saved.*No space left.*v00000001 stays"
        ) as e:
            save(tmp_path, 2, module)
    assert e.value.errno == errno.ENOSPC
    assert names(tmp_path) == ["latest", "v00000001"]
    assert read_payload(tmp_path / "libero").version == 1
    assert read_payload(save(tmp_path, 2, module)).version == 2


def test_a_version_that_is_latest_stays_although_its_name_could_not_be_flushed(tmp_path, monkeypatch) -> None:
    """The last thing that can fail: the folder is in force by then, and must not be removed."""
    module, real = Module(), os.fsync
    save(tmp_path, 1, module)

    def full(descriptor: int) -> None:
        if (tmp_path / "libero" / "latest").read_text() == "v00000002\n":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="v00000002 stays in force"):
            save(tmp_path, 2, module)
    assert names(tmp_path) == ["latest", "v00000001", "v00000002"] and read_payload(tmp_path / "libero").version == 2


def test_a_write_that_lies_is_found_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C2: what was read back is compared with what was given, not only with its own digest."""
    module = Module()
    save(tmp_path, 1, module)
    real = checkpoint.safetensors_save
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "safetensors_save", lambda t: real({k: torch.zeros_like(v) for k, v in t.items()}))
        with pytest.raises(PayloadError, match="head tensors read back differently"):
            save(tmp_path, 2, module)
    assert names(tmp_path) == ["latest", "v00000001"]


def test_manifest_digests_are_of_the_files(tmp_path: Path) -> None:
    path = save(tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["files"].keys() == {"head.safetensors", "optimizer.safetensors", "state.json"}
    assert manifest["format"] == 1 and manifest["policy_version"] == 1
