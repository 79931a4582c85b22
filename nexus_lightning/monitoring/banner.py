"""The start banner: what was decided, before anything runs. Pure text from plain dicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

TENANT_COLUMNS = (
    "tenant",
    "task",
    "head",
    "trainable",
    "memory",
    "state",
    "action",
    "chunk/execute",
    "cameras",
    "source",
    "",
)


def banner(
    *,
    run_dir: str,
    seed: int,
    backbone: Mapping,
    device: Mapping,
    tenants: Sequence[Mapping],
    placement: Mapping[str, object],
    queues: Mapping[str, object],
    features: Mapping[str, str] | None = None,
    resumed_from: str | None = None,
) -> str:
    """The text printed when a run starts.

    Args:
        run_dir: the run folder.
        seed: the run's seed.
        backbone: ``name``, ``parameters`` (int), ``fingerprint`` (hex), ``pretrained`` (bool).
        device: ``name``, ``precision``, ``reason`` (why this one).
        tenants: one mapping each: ``name``, ``task``, ``head``, ``trainable_parameters``, ``memory`` (of weights,
            optimizer and served copies, for people), ``state_dim``, ``action_dim``, ``chunk``, ``execute``, ``cameras``
            (sequence), ``source`` (environment or dataset), ``privileged`` (sequence).
        placement: shown as ``key value, key value``.
        queues: likewise.
        features: per RL tenant, whether its rollouts keep their features, and why.
        resumed_from: the checkpoint this run continues, None for a fresh run.
    """
    weights = "pretrained" if backbone["pretrained"] else "random weights"
    size, fingerprint = count_text(backbone["parameters"]), backbone["fingerprint"][:12]
    lines = {
        "run": run_dir + (f"  (resumed from {resumed_from})" if resumed_from else ""),
        "seed": str(seed),
        "backbone": f"{backbone['name']}, {size} parameters, frozen, {weights}, fingerprint {fingerprint}",
        "device": f"{device['name']}, {device['precision']} ({device['reason']})",
        "placement": _pairs(placement),
        "queues": _pairs(queues),
    }
    if features:
        lines["features"] = "; ".join(f"{tenant} {text}" for tenant, text in features.items())
    rows = [
        (
            t["name"],
            t["task"],
            t["head"],
            count_text(t["trainable_parameters"]),
            t["memory"],
            t["state_dim"],
            t["action_dim"],
            f"{t['chunk']}/{t['execute']}",
            ", ".join(t["cameras"]) or "none",
            t["source"],
            privileged_text(t["privileged"]),
        )
        for t in tenants
    ]
    head = [f"{key:<10} {value}" for key, value in lines.items()]
    return "\n".join(["nexus-lightning", *head, "", text_table(TENANT_COLUMNS, rows)])


def privileged_text(names: Sequence[str]) -> str:
    """``privileged: obj_pose`` for simulator-only inputs, empty for honest sensors."""
    return f"privileged: {', '.join(names)}" if names else ""


def count_text(count: int) -> str:
    """A number of parameters for people.

    Example:
        >>> count_text(950), count_text(128_400), count_text(27_100_000)
        ('950', '128.4 k', '27.1 M')
    """
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return str(count)


def text_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Left-aligned columns under a rule; no trailing blanks."""
    cells = [tuple(columns), *(tuple(str(c) for c in row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def _pairs(values: Mapping[str, object]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items()) or "default"
