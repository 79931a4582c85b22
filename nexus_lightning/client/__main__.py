"""``python -m nexus_lightning.client``: the service from a shell. Address and token come from ``NEXUS_URL`` and
``NEXUS_TOKEN``, or ``--url``; a token has no place in a command line, where everybody on the machine can read it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nexus_lightning.client.client import NexusClient
from nexus_lightning.client.futures import NexusFuture
from nexus_lightning.services.errors import NexusError

#: Of a description, in tables.
COLUMNS = ("name", "owner", "state", "task", "policy_version", "jobs_completed", "target_jobs", "tenant_id")


TEXT = """Train on a running service. With an operator's token list, describe, pause, resume, cancel and delete reach
every account's tenants."""


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m nexus_lightning.client", description=TEXT)
    top.add_argument("--url", help="of the server; default: NEXUS_URL")
    top.add_argument("--json", action="store_true", help="print JSON instead of tables")
    verbs = top.add_subparsers(dest="verb", required=True)

    def verb(name: str, text: str, tenant: bool = True) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=text, description=text)
        sub.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        if tenant:
            sub.add_argument("tenant", help="name or id")
        return sub

    verb("list", "All tenants of the account; an operator's: of all accounts.", tenant=False)
    verb("describe", "One tenant.")
    create = verb("create", "Create a tenant.", tenant=False)
    create.add_argument("spec", help="YAML or JSON file with name, schema, head ...; - for stdin")
    train = verb("train", "Start a workload and wait for its end.")
    train.add_argument("--spec", help="YAML or JSON file with the workload; - for stdin")
    train.add_argument("--task", choices=("sft", "rl", "offline_rl", "eval"))
    train.add_argument("--dataset", help="name in the server's registry")
    train.add_argument("--environment", help="name in the server's registry")
    train.add_argument("--target-jobs", type=int)
    train.add_argument("--no-wait", action="store_true", help="print the workload and leave it running")
    evaluate = verb("evaluate", "Success rate of the current policy.")
    evaluate.add_argument("--episodes", type=int, default=20)
    evaluate.add_argument("--first-seed", type=int, default=0)
    evaluate.add_argument("--num-envs", type=int, default=1)
    evaluate.add_argument("--environment", help="name in the server's registry; default: the workload's")
    evaluate.add_argument("--policy-version", type=int)
    export = verb("export", "Save the current version.")
    export.add_argument("--to", metavar="FOLDER", help="download and unpack it there")
    metrics = verb("metrics", "Metrics of a tenant.")
    metrics.add_argument("--follow", action="store_true", help="and those to come, until Ctrl-C")
    metrics.add_argument("--after", type=int, default=0, metavar="ID", help="only rows behind this one")
    verb("pause", "Pause the last workload.")
    verb("resume", "Go on with it.")
    verb("cancel", "End it; what was trained stays.")
    verb("delete", "Delete a tenant with its results and payloads.")
    predict = verb("predict", "Action chunks for observations.")
    predict.add_argument("observation", help=".npz with state [B, S] and image/<camera> [B, 3, H, W]")
    predict.add_argument("--instruction", action="append", required=True, help="one for all rows, or one a row")
    predict.add_argument("--out", metavar="FILE.npz", help="write the answer's arrays there")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 for what the server refuses, with its reasons; 2 for a wrong command line."""
    options = parser().parse_args(argv)
    try:
        with NexusClient(options.url) as client:
            _run(client, options)
    except (NexusError, OSError, ValueError) as error:  # NexusError first: it is one of the others as well
        if options.json and isinstance(error, NexusError):
            print(json.dumps(error.to_json()), file=sys.stderr)
        else:
            print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _run(client: NexusClient, options: argparse.Namespace) -> None:
    verb, as_json = options.verb, options.json
    if verb == "list":
        tenants = client.list_tenants()
        columns = [key for key in COLUMNS if key != "owner" or any(key in tenant for tenant in tenants)]
        print(json.dumps(tenants) if as_json else table(tenants, columns))
        return
    if verb == "create":
        spec = read_spec(options.spec)
        missing = [key for key in ("name", "schema", "head") if key not in spec]
        if missing:
            raise ValueError(f"{options.spec}: {', '.join(missing)} missing")
        show(client.create_tenant(**spec).describe(), as_json)
        return
    tenant = client.tenant(options.tenant)
    if verb == "describe":
        show(tenant.describe(), as_json)
    elif verb == "train":
        spec = read_spec(options.spec) if options.spec else {}
        flags = {"task": options.task, "dataset": options.dataset, "environment": options.environment}
        flags["target_jobs"] = options.target_jobs
        spec.update({key: value for key, value in flags.items() if value is not None})
        if "task" not in spec:
            raise ValueError("train: give --task or --spec")
        workload = tenant.train(**spec)
        if options.no_wait:
            show({"workload_id": workload.workload_id, "future_id": workload.future_id}, as_json)
        else:
            show(workload.result(progress=not as_json and sys.stderr.isatty()), as_json)
    elif verb == "evaluate":
        wanted = {"environment": options.environment, "policy_version": options.policy_version}
        wanted = {key: value for key, value in wanted.items() if value is not None}
        future: NexusFuture[dict[str, Any]] = tenant.evaluate(
            options.episodes, first_seed=options.first_seed, num_envs=options.num_envs, **wanted
        )
        show(future.result(), as_json)
    elif verb == "export":
        found = tenant.export().result()
        if options.to:
            found["folder"] = str(tenant.download(found["policy_version"], options.to))
        show(found, as_json)
    elif verb == "metrics":
        rows = tenant.stream_metrics(options.after) if options.follow else tenant.metrics(options.after)
        for row in rows:
            numbers = "  ".join(f"{key}={short(value)}" for key, value in sorted(row["metrics"].items()))
            print(json.dumps(row) if as_json else f"{row['id']:>6}  {numbers}", flush=True)
    elif verb == "predict":
        with np.load(options.observation, allow_pickle=False) as file:
            observation = {name: file[name] for name in file.files}
        if not observation:
            raise ValueError(f"{options.observation}: no arrays")
        rows = len(next(iter(observation.values())))
        texts = options.instruction * rows if len(options.instruction) == 1 else options.instruction
        answer = tenant.predict(observation, texts)
        if options.out:
            np.savez(options.out, **{name.replace("/", "."): array for name, array in answer.items()})  # pyright: ignore[reportArgumentType]
        show({name: array.tolist() for name, array in answer.items() if name in ("action", "policy_version")}, as_json)
    else:
        getattr(tenant, verb)()
        show({"tenant_id": tenant.tenant_id, "done": verb}, as_json)


def read_spec(path: str) -> dict[str, Any]:
    """A YAML or JSON file (JSON is YAML)."""
    import yaml

    text = sys.stdin.read() if path == "-" else Path(path).read_text()
    spec = yaml.safe_load(text)
    if not isinstance(spec, dict):
        raise ValueError(f"{path}: a map is needed, not {type(spec).__name__}")
    return spec


def show(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found))
        return
    width = max(map(len, found), default=0)
    for key, value in found.items():
        print(f"{key:<{width}}  {short(value)}")


def table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    """Left-aligned columns under their names.

    Example:
        >>> print(table([{"name": "a", "n": 1}, {"name": "bcd", "n": None}], ["name", "n"]))
        name  n
        a     1
        bcd   -
    """
    cells = [list(columns), *([short(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)) for line in cells]
    return "\n".join(line.rstrip() for line in lines)


def short(value: Any) -> str:
    """For a table: numbers with a few digits, nothing as a dash; control characters of a name stay out of terminals."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    text = value if isinstance(value, str) else json.dumps(value)
    return "".join(c if c.isprintable() else "?" for c in text)


if __name__ == "__main__":
    sys.exit(main())
