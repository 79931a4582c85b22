"""The zoo: what there is, whether it keeps its contract, how much memory a run would need.

Examples:
    python scripts/models.py list
    python scripts/models.py check all --json check.json
    python scripts/models.py check qwen3_vl_tiny flow_matching
    python scripts/models.py estimate '+tenants=[libero]' backbone=qwen3_vl_4b
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # models/ and envs/ live beside scripts/

import torch
import yaml
from hydra.utils import get_class, instantiate
from tqdm import tqdm

from nexus_lightning.backbone import Backbone, SharedBackbone
from nexus_lightning.checks import INSTRUCTIONS, check_backbone, check_head, random_observation
from nexus_lightning.config import ConfigError, compose_config, config_dirs, split_head, validate
from nexus_lightning.head import ActionHead, choose_kind
from nexus_lightning.memory import (
    estimate,
    estimate_table,
    feature_bytes,
    free_bytes,
    gigabytes,
    head_memory,
    meta_backbone,
    module_bytes,
)
from nexus_lightning.monitoring.banner import count_text, text_table
from nexus_lightning.schema import TenantSchema

ROOT = Path(__file__).resolve().parent.parent
#: A single-arm tenant: one camera, 8-D state, 7-D actions.
SCHEMA = TenantSchema(cameras=("base_camera",), image_size=128, state_dim=8, action_dim=7, chunk=8, execute=8)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("list", "every backbone and head"), ("check", "run check_backbone and check_head")):
        command = commands.add_parser(name, help=text)
        command.add_argument("--json", type=Path, help="write the figures there too")
        if name == "check":
            command.add_argument(
                "backbone", help="`all` (every one that needs no download), or a name in conf/backbone"
            )
            command.add_argument("head", nargs="?", default="all", help="`all`, or a name in conf/head")
    command = commands.add_parser("estimate", help="memory of a configuration, without weights or data")
    command.add_argument("--json", type=Path, help="write the figures there too")
    command.add_argument("overrides", nargs="+", help="as for train.py")
    words, folders = config_dirs(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(words)
    if folders and options.command != "estimate":
        parser.error(f"--config-dir={folders[0]}: {options.command} looks into conf/ alone; estimate takes it")
    torch.set_num_threads(min(torch.get_num_threads(), 2))
    try:
        if options.command == "list":
            figures, failed = _list(), 0
        elif options.command == "check":
            figures, failed = _check(options.backbone, options.head)
        else:
            figures, failed = _estimate([*options.overrides, *(f"--config-dir={f}" for f in folders)]), 0
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2))
    return int(failed > 0)


def _nodes(group: str) -> dict[str, dict[str, Any]]:
    files = sorted((ROOT / "conf" / group).glob("*.yaml"))
    return {file.stem: yaml.safe_load(file.read_text()) for file in files}


# ---------------------------------------------------------------------------------------------------------------- list


def _list() -> dict[str, Any]:
    backbones: dict[str, Any] = {}
    for name, node in tqdm(_nodes("backbone").items(), desc="backbones", leave=False):
        cls: Any = get_class(node["_target_"])
        entry = {"class": cls.__name__, "weights": node.get("pretrained", "random"), "kinds": list(cls.kinds)}
        if _local(node) or hasattr(cls, "on_meta"):
            backbone = meta_backbone(node)
            entry |= {"parameters": sum(p.numel() for p in backbone.parameters()), "bytes": module_bytes(backbone)}
        backbones[name] = entry
    heads: dict[str, Any] = {}
    local = {name: instantiate(node) for name, node in _nodes("backbone").items() if _local(node)}
    for name, node in tqdm(_nodes("head").items(), desc="heads", leave=False):
        cls = get_class(node["_target_"])
        heads[name] = {"class": cls.__name__, "reads": list(cls.reads), "rl": cls.supports_rl}
        for partner, backbone in local.items():
            built = _try_build(cls, node, _nodes("backbone")[partner], backbone)
            if not isinstance(built, str):
                memory = head_memory(built[0])
                heads[name] |= {
                    "on": partner,
                    "parameters": memory.parameters,
                    "adam_bytes": memory.adam_bytes,
                    "total_bytes": memory.total_bytes,
                }
                break
    rows = [
        (
            n,
            b["class"],
            b["weights"],
            ", ".join(b["kinds"]),
            count_text(b["parameters"]) if "parameters" in b else "needs its checkpoint",
            gigabytes(b["bytes"]) if "bytes" in b else "-",
        )
        for n, b in backbones.items()
    ]
    print(text_table(("backbone", "class", "weights", "gives", "parameters", "memory"), rows))
    rows = [
        (
            n,
            h["class"],
            ", ".join(h["reads"]),
            "yes" if h["rl"] else "no",
            count_text(h["parameters"]) if "parameters" in h else "-",
            gigabytes(h["adam_bytes"]) if "adam_bytes" in h else "-",
            gigabytes(h["total_bytes"]) if "total_bytes" in h else "-",
            h.get("on", "-"),
        )
        for n, h in heads.items()
    ]
    print()
    print(text_table(("head", "class", "reads", "RL", "trainable", "Adam", "per tenant", "counted on"), rows))
    print(f"\ncounted for chunk {SCHEMA.chunk}, {SCHEMA.action_dim}-D actions, {SCHEMA.state_dim}-D state, one camera")
    return {"backbones": backbones, "heads": heads}


# --------------------------------------------------------------------------------------------------------------- check


def _check(backbone_name: str, head_name: str) -> tuple[dict[str, Any], int]:
    """Every pair that fits; a pair that does not fit is listed with the reason."""
    backbones, heads = _nodes("backbone"), _nodes("head")
    for name, known, key in ((backbone_name, backbones, "backbone"), (head_name, heads, "head")):
        if name != "all" and name not in known:
            raise ConfigError([f"{key}={name}: choose all or one of {', '.join(known)}"])
    chosen = {n: v for n, v in backbones.items() if backbone_name == n or (backbone_name == "all" and _local(v))}
    results: list[dict[str, Any]] = []
    pairs = [(b, h) for b in chosen for h in heads if head_name in ("all", h)]
    bar = tqdm(total=len(chosen) + len(pairs), desc="checks", leave=False)
    for name, node in chosen.items():
        start = time.perf_counter()
        backbone = instantiate(node)
        results.append(_result(name, "", lambda b=backbone: check_backbone(b, SCHEMA)))
        bar.update()
        observation = random_observation(SCHEMA, len(INSTRUCTIONS))
        for head in (h for b, h in pairs if b == name):
            bar.set_postfix_str(f"{name} + {head}")
            results.append(_pair(name, head, node, backbone, heads[head], observation))
            bar.update()
        results[-1]["seconds_backbone"] = time.perf_counter() - start
    bar.close()
    rows = [
        (r["backbone"], r["head"] or "(itself)", r.get("kind", ""), r["result"], r.get("feature", "")) for r in results
    ]
    print(text_table(("backbone", "head", "reads", "result", "feature per sample"), rows))
    failed = [r for r in results if r["result"] == "FAILED"]
    for result in failed:
        print(f"\n{result['backbone']} + {result['head'] or '(itself)'}: {result['detail']}")
    reasons: dict[str, set[str]] = {}
    for result in results:
        if result["result"] == "does not fit":
            reasons.setdefault(f"{result['head']}: {result['detail']}", set()).add(result["backbone"])
    print("\nnot checked, because they do not fit:")
    for reason, names in sorted(reasons.items()):
        print(f"  {reason} ({', '.join(sorted(names))})")
    counts = {key: sum(r["result"] == key for r in results) for key in ("ok", "FAILED", "does not fit")}
    print("\n" + ", ".join(f"{count} {key}" for key, count in counts.items()))
    return {"results": results, "summary": counts}, len(failed)


def _pair(name: str, head: str, backbone_node: dict[str, Any], backbone: Backbone, node: dict[str, Any], observation):
    cls = get_class(node["_target_"])
    built = _try_build(cls, node, backbone_node, backbone)
    if isinstance(built, str):
        return {"backbone": name, "head": head, "result": "does not fit", "detail": built}
    example, backbone = built
    spec = example.feature_spec
    features = backbone(observation, INSTRUCTIONS, SCHEMA, (spec.kind,)).select(spec)

    def check() -> None:
        check_head(lambda spec, schema: _build(cls, node, backbone_node, backbone), spec, SCHEMA, features=features)

    return _result(name, head, check) | {"kind": spec.kind, "feature": gigabytes(feature_bytes(features))}


def _result(backbone: str, head: str, check) -> dict[str, Any]:
    try:
        check()
    except Exception as error:  # the table reports every pair, whatever one of them raises
        return {"backbone": backbone, "head": head, "result": "FAILED", "detail": f"{type(error).__name__}: {error}"}
    return {"backbone": backbone, "head": head, "result": "ok"}


def _try_build(cls: type[ActionHead], node: dict[str, Any], backbone_node: dict[str, Any], backbone: Backbone):
    """The head and the backbone that it sits on, or the reason why the two do not fit."""
    if cls.backbones and type(backbone).__name__ not in cls.backbones:
        return f"continues {', '.join(cls.backbones)}"
    if cls.reads == ("layer_states",) and hasattr(backbone, "decoder_layers"):
        # A head on the last k layers reads one state, so the backbone is told to give that one alone.
        start = len(cast(Any, backbone).decoder_layers()) - node["num_layers"]
        backbone_node = {**backbone_node, "layers": [start]}
        backbone = instantiate(backbone_node)
    try:
        return _build(cls, node, backbone_node, backbone), backbone
    except ValueError as error:
        return str(error)


def _build(
    cls: type[ActionHead], node: dict[str, Any], backbone_node: dict[str, Any], backbone: Backbone
) -> ActionHead:
    _, arguments, settings = split_head(node)
    kind = choose_kind(cls.reads, backbone.kinds, settings.get("kind"))
    if cls.backbones and isinstance(backbone_node.get("pretrained"), str):
        arguments["pretrained"] = backbone_node["pretrained"]  # backbone and head of one published policy
    if cls.continues_backbone:
        arguments["backbone"] = SharedBackbone(backbone)
    return cls(feature_spec=backbone.feature_spec(SCHEMA, kind), schema=SCHEMA, **arguments)


def _local(node: dict[str, Any]) -> bool:
    return not _needs_download(node)


def _needs_download(node: dict[str, Any]) -> bool:
    """A `pretrained` that is a hub name; `tiny`, true and false need nothing."""
    pretrained = node.get("pretrained")
    return isinstance(pretrained, str) and pretrained != "tiny"


# ------------------------------------------------------------------------------------------------------------ estimate


def _estimate(overrides: list[str]) -> dict[str, Any]:
    from hydra.errors import HydraException

    try:
        config = compose_config(ROOT / "conf", overrides)
    except HydraException as error:
        raise ConfigError([str(error)]) from None
    validate(config)
    figures = estimate(config)
    print(estimate_table(figures, free_bytes(torch.device("cpu"))))
    return figures


if __name__ == "__main__":
    raise SystemExit(main())
