"""Evaluate a payload, or several on the same episodes: on the tenant's own tasks, or on a suite of its simulator.

    python scripts/evaluate.py payload=outputs/latest/tenants/libero episodes=20
    python scripts/evaluate.py payload=outputs/latest/tenants/libero suite=libero_object episodes=10 video=grid.mp4
    python scripts/evaluate.py 'compare=[run_a/tenants/toy,run_b/tenants/toy]' episodes=40 png=compare.png

Keys: payload or compare (folders of a tenant or of one version), suite (libero_spatial, libero_object, libero_goal,
libero_10, libero_90, metaworld_easy, metaworld_medium, metaworld_hard, metaworld_very_hard, metaworld_mt10,
metaworld_mt50, maniskill, toy; default: the tenant's own tasks), tasks (some of the suite, or of the simulator),
episodes (of each task), first_seed (LIBERO: seed e starts in recorded state e), num_envs (simulators that share the
episodes: it changes no result), json (path), png (path: success with intervals by task, or by payload), video (an .mp4
path, payload only: a grid of episodes, green border: success, red: failure).
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # models/ and envs/ live beside scripts/


@dataclass
class Arguments:
    payload: str | None = None
    compare: list[str] = field(default_factory=list)
    suite: str | None = None
    tasks: list[Any] = field(default_factory=list)
    episodes: int = 20
    first_seed: int = 0
    num_envs: int = 1
    video: str | None = None
    json: str | None = None
    png: str | None = None


def parse(arguments: list[str]) -> Arguments:
    try:
        args = OmegaConf.merge(OmegaConf.structured(Arguments), OmegaConf.from_dotlist(arguments))
        if (args.payload is None) == (not args.compare):
            raise ValueError("give either payload=<folder> or compare=[<folder>,<folder>,...]")
        if args.compare and (len(args.compare) < 2 or args.video is not None):
            raise ValueError("compare=[...] needs at least two folders, and makes no video")
        for key in ("episodes", "num_envs"):
            if args[key] < 1:
                raise ValueError(f"{key}={args[key]}: must be at least 1")
        result = OmegaConf.to_object(args)
    except (OmegaConfBaseException, ValueError) as error:
        raise SystemExit(f"error: {error}\n{__doc__}") from None
    assert isinstance(result, Arguments)
    return result


def main(arguments: list[str] | None = None) -> dict:
    args = parse(sys.argv[1:] if arguments is None else arguments)
    from nexus_lightning.evaluation import success_figure
    from nexus_lightning.monitoring.stats import finite
    from nexus_lightning.producers.evaluation import result_dict

    # Everything that does not fit is found before the first simulator starts and the first backbone is loaded.
    folders = args.compare or [str(args.payload)]
    environments = [environment_of(folder, args) for folder in folders]
    results = [run(folder, environment, args) for folder, environment in zip(folders, environments, strict=True)]
    if args.compare:
        report = compare(args, results)
    else:
        report = result_dict(results[0])
        if args.png is not None:
            rows = results[0].by_task
            success_figure([row.task for row in rows], rows, Path(args.png))
    if args.json is not None:
        Path(args.json).write_text(json.dumps(finite(report), indent=2, allow_nan=False))
    return report


def seeds_of(args: Arguments) -> list[int]:
    return list(range(args.first_seed, args.first_seed + args.episodes))


def environment_of(folder: str, args: Arguments):
    """The payload's environment with the tasks asked for."""
    from nexus_lightning.evaluation import choose_tasks
    from nexus_lightning.policy import payload_tenant

    try:
        environment, left_out = choose_tasks(payload_tenant(folder), args.suite, args.tasks, seeds_of(args))
    except ValueError as error:
        raise SystemExit(f"error: payload {folder}: {error}") from None
    for line in left_out:
        print(f"left out: {line}")
    return environment


def run(folder: str, environment, args: Arguments):
    """One payload over the asked episodes; prints its table."""
    from nexus_lightning.evaluation import evaluate
    from nexus_lightning.policy import load_policy
    from nexus_lightning.simulator import SimulatorDied, SimulatorError

    policy = load_policy(folder)
    seeds = seeds_of(args)
    with tqdm(total=len(seeds) * max(1, len(environment.tasks)), desc=policy.slot.name, unit="episode") as bar:

        def progress(finished: int) -> None:
            bar.update(finished - bar.n)

        video = None if args.video is None else Path(args.video)
        try:
            result = evaluate(policy, seeds, args.num_envs, video, progress, environment)
        except (SimulatorDied, SimulatorError) as error:
            raise SystemExit(f"error: payload {folder}: {error}") from None
    marked = f" (privileged: {', '.join(policy.schema.privileged)})" if policy.schema.privileged else ""
    print(
        f"{result.tenant} v{result.policy_version}{marked}: success {result.success_rate:.1%} "
        f"[{result.ci_low:.1%}, {result.ci_high:.1%}] n={result.n}, at the end {result.success_at_end:.1%}, "
        f"return {result.episode_return:.3f}, length {result.episode_length:.1f}"
    )
    if len(result.by_task) > 1:
        print(task_table(result))
    return result


def task_table(result) -> str:
    """One line per task, and the total over all episodes."""
    from nexus_lightning.monitoring.banner import text_table

    def line(name: str, instruction: str, r) -> tuple[str, ...]:
        return (
            name,
            f"{r.success_rate:.1%}",
            f"{r.ci_low:.0%} .. {r.ci_high:.0%}",
            str(r.n),
            f"{r.success_at_end:.1%}",
            f"{r.episode_return:.3f}",
            f"{r.episode_length:.1f}",
            instruction,
        )

    head = ("task", "success", "95 % interval", "n", "at the end", "return", "length", "instruction")
    rows = [line(row.task, row.instruction, row) for row in result.by_task]
    return text_table(head, [*rows, line("all", "", result)])


def compare(args: Arguments, results: list) -> dict:
    """Table and figure of several payloads; each is tested against the first on the same episodes (exact McNemar)."""
    from nexus_lightning.evaluation import paired_test, success_figure
    from nexus_lightning.monitoring.banner import text_table
    from nexus_lightning.producers.evaluation import result_dict

    if any((r.tasks, r.seeds) != (results[0].tasks, results[0].seeds) for r in results):
        raise SystemExit(
            "error: compare=[...]: the payloads were measured on different tasks; name them with tasks=[...]"
        )
    names = [chr(ord("A") + i) for i in range(len(results))]
    p_values = [paired_test(results[0].successes, result.successes) for result in results]
    rows = [
        (
            name,
            f"{r.tenant} v{r.policy_version}",
            f"{r.success_rate:.1%}",
            f"{r.ci_low:.0%} .. {r.ci_high:.0%}",
            f"{r.success_rate - results[0].success_rate:+.1%}",
            "" if i == 0 else f"{p_values[i]:.3g}",
            folder,
        )
        for i, (name, r, folder) in enumerate(zip(names, results, args.compare, strict=True))
    ]
    print(text_table(("", "policy", "success", "95 % interval", "against A", "p (paired)", "payload"), rows))
    if args.png is not None:
        success_figure(names, results, Path(args.png))
    report = [
        {"payload": f, **result_dict(r), "p_against_first": p}
        for f, r, p in zip(args.compare, results, p_values, strict=True)
    ]
    return {"payloads": report, "seeds": list(results[0].seeds), "tasks": list(results[0].tasks)}


if __name__ == "__main__":
    main()
