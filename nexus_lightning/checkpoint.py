"""Tenant payloads on disk: atomic, verified, readable without the run that wrote them.

::

    <root>/<tenant>/                 root is ``<run>/tenants``
        latest                       text: the folder name of the newest complete version
        v00000012/
            head.safetensors         tensors of head and normaliser
            optimizer.safetensors    optimizer tensors as ``<parameter index>.<name>``, generator state as ``rng``
            state.json               the optimizer's plain values; LR schedule, data cursor, counters
            manifest.json            schema, signatures, backbone fingerprint, config, task, version, file digests
        v00000012-r1/                the same policy version saved again with another cursor
        .tmp-*                       left by a killed save; removed at the next one

A save writes a temporary folder, flushes it to disk, loads it back and compares, renames it, and last replaces
``latest``. A folder with a version name is therefore complete, and ``latest`` always names one: a save that dies at any
point leaves the previous version in force. No pickle anywhere. One writer per tenant at a time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as safetensors_load
from safetensors.torch import save as safetensors_save
from torch import Tensor, nn

from nexus_lightning.files import TEMPORARY, fsync_folder, rename_folder, write_atomically

FORMAT = 1
#: What the caller's manifest must say; the rest is added by :func:`write_payload`.
MANIFEST_KEYS = ("schema", "signature", "prefix_signature", "backbone_fingerprint", "config", "task")

_TENANT = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_FOLDER = re.compile(r"v(\d{8,})(?:-r(\d+))?")
_DATA_FILES = ("head.safetensors", "optimizer.safetensors", "state.json")
_RNG = "rng"


class PayloadError(ValueError):
    """A payload cannot be saved or loaded as asked; the message names the tenant or path, the keys and the fix."""


class DamagedPayload(PayloadError):
    """A file of a version is missing, cut off or changed; the message names the newest intact version beside it."""


@dataclass(frozen=True)
class Payload:
    """One tenant's state as read from disk; all tensors on the CPU.

    Attributes:
        tensors: head and normaliser, name -> tensor.
        optimizer: as ``torch.optim.Optimizer.state_dict()`` (tuples in ``param_groups`` come back as lists).
        state: LR schedule, cursor, counters.
        manifest: see the module docstring.
        path: the version folder.
        rng: generator state, uint8 ``[K]``, or None when none was saved.
    """

    tensors: dict[str, Tensor]
    optimizer: dict[str, Any]
    state: dict[str, Any]
    manifest: dict[str, Any]
    path: Path
    rng: Tensor | None = None

    @property
    def tenant(self) -> str:
        """The tenant's name."""
        return self.manifest["tenant"]

    @property
    def version(self) -> int:
        """The policy version."""
        return self.manifest["policy_version"]


def check_tenant_name(tenant: str) -> str:
    """Returns ``tenant``, or raises :class:`PayloadError` when it cannot name a folder.

    Example:
        >>> check_tenant_name("libero_b")
        'libero_b'
    """
    if not isinstance(tenant, str) or not _TENANT.fullmatch(tenant):
        raise PayloadError(f"tenant {tenant!r}: use a letter, then up to 63 letters, digits, underscores or hyphens")
    return tenant


def tensors_digest(tensors: dict[str, Tensor]) -> str:
    """sha256 (hex) over name, dtype, shape and bytes of every tensor, in name order; device and layout do not matter.

    Example:
        >>> a = {"w": torch.ones(2, 2), "b": torch.zeros(1)}
        >>> tensors_digest(a) == tensors_digest(dict(reversed(a.items()))), tensors_digest(a) == tensors_digest({})
        (True, False)
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        header = json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode()
        digest.update(len(header).to_bytes(8, "little") + header)
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


# ---- save ------------------------------------------------------------------------------------------------------------


def write_payload(
    root: Path,
    tenant: str,
    version: int,
    *,
    tensors: dict[str, Tensor],
    optimizer: dict[str, Any],
    state: dict[str, Any],
    manifest: dict[str, Any],
    rng: Tensor | None = None,
    expected_keys: Iterable[str] | None = None,
    keep: int | None = None,
    pinned: Collection[int] = (),
    extra: Mapping[str, bytes] | None = None,
) -> Path:
    """Saves one version of one tenant and makes it ``latest``.

    Saving a version again is allowed: the same content returns the folder that is there, other content (a moved cursor)
    gets a folder of its own, so that a complete folder never changes.

    Args:
        root: ``<run>/tenants``; made if needed.
        tenant: see :func:`check_tenant_name`.
        version: policy version, >= 0.
        tensors: head and normaliser, at least one; any dtype and device.
        optimizer: ``torch.optim.Optimizer.state_dict()``; per-parameter values are tensors or JSON values.
        state: JSON values only, text keys only (what would come back different is an error).
        manifest: must have ``MANIFEST_KEYS``; JSON values. ``created`` (ISO 8601, UTC) is filled in when absent.
        rng: generator state, uint8 ``[K]``.
        expected_keys: names that ``tensors`` must have, no more and no less.
        keep: newest versions to keep, >= 1; None keeps all. ``latest`` and ``pinned`` versions are never removed.
        pinned: policy versions somebody still uses.
        extra: more files for readers of other libraries, ``folder/name -> content``; :func:`read_payload` ignores them.

    Returns:
        The version folder.

    Raises:
        PayloadError: bad name, version, keys or values, or what was read back differs. Nothing is left behind.
        OSError: writing failed (disk full ...): same errno, message with tenant, version and what is still in force.
    """
    check_tenant_name(tenant)
    if not isinstance(version, int) or version < 0:
        raise PayloadError(f"tenant {tenant!r}: version {version!r}: must be an integer of at least 0")
    if keep is not None and keep < 1:
        raise PayloadError(f"tenant {tenant!r}: keep={keep}: must be at least 1, or None to keep all")
    what = f"tenant {tenant!r} version {version}"
    _check_keys(what, tensors, expected_keys)
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    optimizer_tensors, optimizer_values = _split_optimizer(what, optimizer, rng)
    files = {
        "head.safetensors": safetensors_save(tensors),
        "optimizer.safetensors": safetensors_save(optimizer_tensors),
        "state.json": _to_json(what, "state", {"optimizer": optimizer_values, "state": state}),
    }
    full_manifest = _complete_manifest(what, tenant, version, manifest, tensors, files)
    files["manifest.json"] = _to_json(what, "manifest", full_manifest)

    folder = Path(root).resolve() / tenant
    folder.mkdir(parents=True, exist_ok=True)
    if folder.resolve() != folder:
        raise PayloadError(f"{what}: {folder} leads outside of {root}: payload folders must not be links")
    _remove_temporaries(folder)
    previous = _sound_latest(folder)
    target = _same_content(folder, version, full_manifest)
    created = None
    temporary = folder / f"{TEMPORARY}{uuid.uuid4().hex}"
    try:
        if target is None:
            target = _free_folder(folder, version)
            temporary.mkdir()
            for name, data in {**files, **(extra or {})}.items():
                (temporary / name).parent.mkdir(exist_ok=True)
                (temporary / name).write_bytes(data)
            fsync_folder(temporary)
            _verify(what, temporary, tensors, optimizer_tensors, optimizer_values, state)
            created = target
            rename_folder(temporary, target)
        if target.name != previous:
            write_atomically(folder / "latest", f"{target.name}\n", durable=True)
    except BaseException as error:
        if created is not None and _latest_name(folder) != created.name:
            shutil.rmtree(created, ignore_errors=True)
        _remove_temporaries(folder)
        if isinstance(error, OSError):
            name = _sound_latest(folder)
            in_force = f"{name} stays in force" if name else "there is no earlier version"
            raise OSError(
                error.errno, f"{what} was not saved to {folder}: {error.strerror or error}; {in_force}"
            ) from error
        raise
    if keep is not None:
        _prune(folder, keep, {version, *pinned}, target)
    return target


def _check_keys(what: str, tensors: dict[str, Tensor], expected_keys: Iterable[str] | None) -> None:
    if not tensors:
        raise PayloadError(f"{what}: the payload has no tensors")
    odd = [name for name, tensor in tensors.items() if not isinstance(tensor, Tensor)]
    if odd:
        raise PayloadError(f"{what}: not tensors: {', '.join(map(str, odd))}")
    if expected_keys is None:
        return
    expected = set(expected_keys)
    missing, unexpected = sorted(expected - tensors.keys()), sorted(tensors.keys() - expected)
    if missing or unexpected:
        raise PayloadError(f"{what}: missing keys: {_listed(missing)}; unexpected keys: {_listed(unexpected)}")


def _split_optimizer(
    what: str, optimizer: dict[str, Any], rng: Tensor | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by ``<index>.<name>`` (and ``rng``), and the plain rest for state.json."""
    if set(optimizer) != {"state", "param_groups"}:
        raise PayloadError(
            f"{what}: optimizer has the keys {_listed(sorted(map(str, optimizer)))}: give Optimizer.state_dict(), "
            "with state and param_groups"
        )
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for index, entries in optimizer["state"].items():
        if not isinstance(index, int):
            raise PayloadError(f"{what}: optimizer state of {index!r}: parameters are counted by integers")
        values[str(index)] = {}
        for name, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{name}"] = value.detach().cpu().contiguous().clone()
            else:
                values[str(index)][name] = value
    if rng is not None:
        if rng.dtype != torch.uint8 or rng.ndim != 1:
            raise PayloadError(f"{what}: rng is {rng.dtype} {list(rng.shape)}: give Generator.get_state(), uint8 [K]")
        tensors[_RNG] = rng.detach().cpu().contiguous().clone()
    return tensors, {"state": values, "param_groups": optimizer["param_groups"]}


def _complete_manifest(
    what: str, tenant: str, version: int, manifest: dict[str, Any], tensors: dict[str, Tensor], files: dict[str, bytes]
) -> dict[str, Any]:
    missing = [key for key in MANIFEST_KEYS if key not in manifest]
    if missing:
        raise PayloadError(f"{what}: the manifest lacks {_listed(missing)}")
    ours = {"tenant": tenant, "policy_version": version, "format": FORMAT}
    for key, value in ours.items():
        if manifest.get(key, value) != value:
            raise PayloadError(f"{what}: the manifest says {key}={manifest[key]!r}: must be {value!r} or left out")
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **manifest,
        **ours,
        "tensors_digest": tensors_digest(tensors),
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
    }


def _verify(
    what: str,
    folder: Path,
    tensors: dict[str, Tensor],
    optimizer_tensors: dict[str, Tensor],
    optimizer_values: dict[str, Any],
    state: dict[str, Any],
) -> None:
    """Loads a written folder back and compares it with what should be in it."""
    back = read_payload(folder, expected_keys=tensors)
    back_tensors, back_values = _split_optimizer(what, back.optimizer, back.rng)
    different = [
        name
        for name, same in (
            ("head tensors", tensors_digest(back.tensors) == tensors_digest(tensors)),
            ("optimizer tensors", tensors_digest(back_tensors) == tensors_digest(optimizer_tensors)),
            ("optimizer values", _same_json(back_values, optimizer_values)),
            ("state", _same_json(back.state, state)),
        )
        if not same
    ]
    if different:
        raise PayloadError(
            f"{what}: {_listed(different)} read back differently from what was saved "
            "(JSON keys must be text, values plain)"
        )


def _same_json(back: Any, given: Any) -> bool:
    """Equality where a tuple equals a list, NaN equals NaN, and 1, 1.0 and True differ."""
    if isinstance(given, dict):
        return (
            isinstance(back, dict) and back.keys() == given.keys() and all(_same_json(back[k], given[k]) for k in given)
        )
    if isinstance(given, list | tuple):
        return isinstance(back, list) and len(back) == len(given) and all(map(_same_json, back, given))
    if isinstance(given, bool) or isinstance(back, bool) or isinstance(given, int) != isinstance(back, int):
        return back is given
    return back == given or (back != back and given != given)


def _same_content(folder: Path, version: int, manifest: dict[str, Any]) -> Path | None:
    """The intact folder of this version that holds the same (apart from its creation time), if there is one."""
    for name in _version_folders(folder):
        if _parse(name)[0] != version:
            continue
        try:
            there = read_payload(folder / name).manifest
        except PayloadError:
            continue  # damaged: not the same content, the new save gets a folder of its own
        if json.loads(json.dumps({**manifest, "created": ""})) == {**there, "created": ""}:
            return folder / name
    return None


def _free_folder(folder: Path, version: int) -> Path:
    taken = [_parse(name)[1] for name in _version_folders(folder) if _parse(name)[0] == version]
    return folder / (f"v{version:08d}" if not taken else f"v{version:08d}-r{max(taken) + 1}")


def _prune(folder: Path, keep: int, pinned: set[int], newest: Path) -> None:
    for name in _version_folders(folder)[:-keep]:
        if name != newest.name and _parse(name)[0] not in pinned:
            # Renamed first: a kill during the removal must not leave half a version under a version's name.
            doomed = folder / f"{TEMPORARY}{uuid.uuid4().hex}"
            os.rename(folder / name, doomed)
            shutil.rmtree(doomed)


def _remove_temporaries(folder: Path) -> None:
    for path in folder.glob(f"{TEMPORARY}*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _to_json(what: str, name: str, value: Any) -> bytes:
    try:
        return json.dumps(value, indent=1, sort_keys=True).encode()
    except TypeError as error:
        raise PayloadError(
            f"{what}: {name} holds a value that is not JSON ({error}): convert it to plain values"
        ) from error


# ---- load ------------------------------------------------------------------------------------------------------------


def resolve_payload(path: Path | str) -> Path:
    """A version folder, or a tenant folder (its ``latest``) -> the version folder.

    Raises:
        PayloadError: neither; lists the versions that are there.
        DamagedPayload: the version has no manifest.
    """
    path = Path(path)
    if (path / "manifest.json").is_file():
        return path
    if not path.is_dir():
        raise PayloadError(f"{path}: no such folder; give a version folder (v00000012) or a tenant's folder")
    if _FOLDER.fullmatch(path.name):
        raise DamagedPayload(f"{path}: manifest.json is missing; {_intact_beside(path)}")
    try:
        name = _latest_name(path)
    except PayloadError as error:
        raise DamagedPayload(f"{error}; {_intact_beside(path / 'latest')}") from error
    there = _version_folders(path)
    if name is None:
        raise PayloadError(
            f"{path}: neither a payload nor a tenant's folder with a 'latest' file; versions here: {_listed(there)}"
        )
    if not (path / name / "manifest.json").is_file():
        raise DamagedPayload(
            f"{path}: 'latest' names {name}, which is not there; versions here: {_listed(there)}; "
            f"{_intact_beside(path / name)}"
        )
    return path / name


def list_payloads(folder: Path | str) -> list[Path]:
    """The version folders of a tenant's folder, oldest first; none when there is no such folder."""
    folder = Path(folder)
    return [folder / name for name in _version_folders(folder)] if folder.is_dir() else []


def read_payload(path: Path | str, *, expected_keys: Iterable[str] | None = None) -> Payload:
    """Reads a payload and checks the sha256 of every file.

    Args:
        path: see :func:`resolve_payload`.
        expected_keys: names that the tensors must have, no more and no less.

    Raises:
        DamagedPayload: a file is missing or damaged; names the newest intact version beside it.
        PayloadError: the format is unknown, or the keys differ.
    """
    path = resolve_payload(path)
    try:
        manifest, files = _read_files(path)
    except DamagedPayload as error:
        raise DamagedPayload(f"{error}; {_intact_beside(path)}") from error
    return _payload(path, manifest, files, expected_keys)


def _payload(
    path: Path, manifest: dict[str, Any], files: dict[str, bytes], expected_keys: Iterable[str] | None = None
) -> Payload:
    tensors = safetensors_load(files["head.safetensors"])
    _check_keys(f"{path} (tenant {manifest['tenant']!r})", tensors, expected_keys)
    optimizer_tensors = safetensors_load(files["optimizer.safetensors"])
    rng = optimizer_tensors.pop(_RNG, None)
    plain = json.loads(files["state.json"])
    optimizer_state: dict[int, dict[str, Any]] = {
        int(index): dict(values) for index, values in plain["optimizer"]["state"].items()
    }
    for key, tensor in optimizer_tensors.items():
        index, name = key.split(".", 1)
        optimizer_state[int(index)][name] = tensor
    optimizer = {"state": optimizer_state, "param_groups": plain["optimizer"]["param_groups"]}
    return Payload(tensors, optimizer, plain["state"], manifest, path, rng)


def read_newest(folder: Path | str) -> tuple[Payload | None, list[str]]:
    """The newest intact version of a tenant's folder: ``latest`` if that is intact, else the next older one that is.

    Returns:
        The payload, None when no version is intact, and a line for each damaged one that would have come before it.
    """
    folder, damaged = Path(folder), []
    for path in _newest_first(folder):
        try:
            return _payload(path, *_read_files(path)), damaged
        except PayloadError as error:
            damaged.append(str(error))
    return None, damaged


def is_intact(path: Path) -> bool:
    """Whether every file of a version folder is what its manifest says; reads all of them."""
    try:
        _read_files(path)
    except PayloadError:
        return False
    return True


def _newest_first(folder: Path) -> list[Path]:
    """The version folders: ``latest`` (a policy that went back to an older version saves a lower number), then from
    the newest to the oldest."""
    latest = _sound_latest(folder)
    return sorted(list_payloads(folder)[::-1], key=lambda path: path.name != latest)


def _intact_beside(path: Path) -> str:
    """Half a sentence for the error about a damaged version."""
    found = next((other.name for other in _newest_first(path.parent) if other != path and is_intact(other)), None)
    return "no version beside it is intact" if found is None else f"the newest intact version beside it is {found}"


def _read_files(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Manifest and data files of a version folder, checked.

    Raises:
        DamagedPayload: see there; without what is beside it.
    """
    manifest, files = read_manifest(path), {}
    for name in _DATA_FILES:
        file = path / name
        if name not in manifest.get("files", ()) or not file.is_file():
            raise DamagedPayload(f"{path}: {name} is missing: the payload is incomplete")
        try:
            files[name] = file.read_bytes()
        except OSError as error:
            raise DamagedPayload(f"{path}: {name} cannot be read ({error.strerror})") from error
        if hashlib.sha256(files[name]).hexdigest() != manifest["files"][name]:
            raise DamagedPayload(f"{path}: {name} does not match its sha256 in the manifest: damaged")
    return manifest, files


def load_into(module: nn.Module, payload: Payload) -> None:
    """Copies ``payload.tensors`` into a module with exactly these names, shapes and dtypes.

    Raises:
        PayloadError: lists every missing or unexpected key and every other shape or dtype. The module is unchanged.
    """
    what = f"{payload.path} (tenant {payload.tenant!r}) does not fit {type(module).__name__}"
    own = module.state_dict()
    _check_keys(what, payload.tensors, own)
    different = [
        f"{name}: {value.dtype} {list(value.shape)} in the payload, "
        f"{own[name].dtype} {list(own[name].shape)} in the module"
        for name, value in payload.tensors.items()
        if value.shape != own[name].shape or value.dtype != own[name].dtype
    ]
    if different:
        raise PayloadError(f"{what}: " + "; ".join(different))
    module.load_state_dict(payload.tensors, strict=True)


def read_manifest(path: Path) -> dict[str, Any]:
    """What a version folder says about itself, without reading its tensors.

    Raises:
        DamagedPayload: it cannot be read.
        PayloadError: it is of another format.
    """
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
    except (OSError, ValueError) as error:
        raise DamagedPayload(f"{path}: manifest.json cannot be read ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise PayloadError(f"{path}: manifest.json is not of payload format {FORMAT}")
    return manifest


def _latest_name(folder: Path) -> str | None:
    if not (folder / "latest").is_file():
        return None
    name = (folder / "latest").read_text().strip()
    if not _FOLDER.fullmatch(name):
        raise PayloadError(
            f"{folder}: 'latest' says {name!r}, which is not a version folder: "
            f"write one of {_listed(_version_folders(folder))}"
        )
    return name


def _sound_latest(folder: Path) -> str | None:
    """:func:`_latest_name`, None also when that file is damaged: the next save writes it anew."""
    try:
        return _latest_name(folder)
    except PayloadError:
        return None


def _version_folders(folder: Path) -> list[str]:
    """Names of the version folders, oldest first."""
    return sorted((p.name for p in folder.iterdir() if p.is_dir() and _FOLDER.fullmatch(p.name)), key=_parse)


def _parse(name: str) -> tuple[int, int]:
    """Folder name -> (policy version, how often it was saved before)."""
    match = _FOLDER.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def _listed(names: Collection[str]) -> str:
    return ", ".join(names) or "none"
