"""Tenants of a run that is going: who is there, who joins, leaves, pauses, goes on, is evaluated.

    python scripts/tenants.py list run=outputs/latest
    python scripts/tenants.py join run=outputs/latest '+tenants=[toy_sft]' tenants.toy_sft.target_jobs=50
    python scripts/tenants.py join run=outputs/latest +tenant@tenants.second=toy_sft
    python scripts/tenants.py leave run=outputs/latest tenant=second
    python scripts/tenants.py pause|resume|evaluate run=outputs/latest tenant=toy_sft

`join` takes the overrides of train.py and lets every tenant of them join; each command returns once the run has done
it, between two of its jobs and on all its ranks. The run listens on a socket in its folder, for its own user alone.
Exit code 2: the order cannot be given; 1: no run is going there.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # models/ and envs/ live beside scripts/

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from nexus_lightning.config import ConfigError, compose_config, composition_error

CONF = Path(__file__).resolve().parent.parent / "conf"
VERBS = ("list", "join", "leave", "pause", "resume", "evaluate")


def main(arguments: list[str] | None = None) -> list[dict[str, Any]] | None:
    given = sys.argv[1:] if arguments is None else arguments
    if not given or given[0] not in VERBS:
        raise SystemExit(f"error: choose one of {', '.join(VERBS)}\n{__doc__}")
    verb, rest = given[0], given[1:]
    own = dict(argument.split("=", 1) for argument in rest if argument.startswith(("run=", "tenant=")))
    overrides = [argument for argument in rest if not argument.startswith(("run=", "tenant="))]
    problems = []
    if "run" not in own:
        problems.append("run: give the run's folder, for example run=outputs/latest")
    if verb not in ("list", "join") and "tenant" not in own:
        problems.append(f"tenant: give the name of the one to {verb}, for example tenant=toy")
    if verb != "join" and overrides:
        problems.append(f"{' '.join(overrides)}: only join takes overrides of train.py")
    try:
        if problems:
            raise ConfigError(problems)
        from nexus_lightning.run.live import ask  # torch takes seconds: what is mistyped is told before

        run_dir = Path(own["run"]).resolve()
        if verb == "list":
            rows = ask(run_dir, verb="list")
            print(json.dumps(rows, indent=2) if not sys.stdout.isatty() else _table(rows))
            return rows
        if verb == "join":
            for name, tenant in _tenants(overrides).items():
                ask(run_dir, verb="join", tenant=name, config=asdict(tenant))
                print(f"tenant {name} has joined {run_dir}")
            return None
        ask(run_dir, verb=verb, tenant=own["tenant"])
        print(f"{verb}: tenant {own['tenant']} of {run_dir}: done")
        return None
    except ConfigError as error:
        print("\n".join(f"error: {problem}" for problem in error.problems), file=sys.stderr)
        raise SystemExit(2) from None
    except ConnectionError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def _tenants(overrides: list[str]) -> dict[str, Any]:
    try:
        tenants = compose_config(CONF, overrides).tenants
    except (HydraException, OmegaConfBaseException) as error:
        raise composition_error(error, CONF, overrides) from None
    if not tenants:
        raise ConfigError(["tenants: nobody joins; for example '+tenants=[toy_sft]'"])
    return tenants


def _table(rows: list[dict[str, Any]]) -> str:
    titles = ("tenant", "task", "state", "jobs", "target_jobs", "policy_version", "success_rate")
    cells = [titles, *(tuple("-" if row[t] is None else str(row[t]) for t in titles) for row in rows)]
    widths = [max(len(row[k]) for row in cells) for k in range(len(titles))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in cells)


if __name__ == "__main__":
    main()
