"""Evaluate a payload, or several on the same seeds.

    python scripts/evaluate.py payload=outputs/latest/tenants/libero episodes=20
    python scripts/evaluate.py 'compare=[run_a/tenants/toy,run_b/tenants/toy]' episodes=40 png=compare.png

Keys: payload or compare (folders of a tenant or of one version), episodes, first_seed, num_envs, json (path), video (an
.mp4 path, payload only), png (path, compare only).
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # models/ and envs/ live beside scripts/


@dataclass
class Arguments:
    payload: str | None = None
    compare: list[str] = field(default_factory=list)
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
        if args.png is not None and not args.compare:
            raise ValueError("png=<path> is the picture of compare=[...]")
        result = OmegaConf.to_object(args)
    except (OmegaConfBaseException, ValueError) as error:
        raise SystemExit(f"error: {error}\n{__doc__}") from None
    assert isinstance(result, Arguments)
    return result


def main() -> None:
    args = parse(sys.argv[1:])
    from nexus_lightning.producers.evaluation import result_dict

    results = [run(folder, args) for folder in args.compare or [str(args.payload)]]
    if args.compare:
        report = compare(args, results)
    else:
        report = result_dict(results[0])
    if args.json is not None:
        Path(args.json).write_text(json.dumps(report, indent=2))


def run(folder: str, args: Arguments):
    """One payload over the asked seeds; prints its line."""
    from nexus_lightning.evaluation import evaluate
    from nexus_lightning.policy import load_policy

    policy = load_policy(folder)
    seeds = list(range(args.first_seed, args.first_seed + args.episodes))
    with tqdm(total=len(seeds), desc=policy.slot.name, unit="episode") as bar:

        def progress(finished: int) -> None:
            bar.update(finished - bar.n)

        video = None if args.video is None else Path(args.video)
        result = evaluate(policy, seeds, args.num_envs, video, progress)
    marked = f" (privileged: {', '.join(policy.schema.privileged)})" if policy.schema.privileged else ""
    print(
        f"{result.tenant} v{result.policy_version}{marked}: success {result.success_rate:.1%} "
        f"[{result.ci_low:.1%}, {result.ci_high:.1%}] n={result.n}, at the end {result.success_at_end:.1%}, "
        f"return {result.episode_return:.3f}, length {result.episode_length:.1f}"
    )
    return result


def compare(args: Arguments, results: list) -> dict:
    """Table and figure of several payloads; each is tested against the first on the same seeds (exact McNemar)."""
    from nexus_lightning.evaluation import comparison_figure, paired_test
    from nexus_lightning.monitoring.banner import text_table
    from nexus_lightning.producers.evaluation import result_dict

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
        comparison_figure(names, results, Path(args.png))
    report = [
        {"payload": f, **result_dict(r), "p_against_first": p}
        for f, r, p in zip(args.compare, results, p_values, strict=True)
    ]
    return {"payloads": report, "seeds": list(results[0].seeds)}


if __name__ == "__main__":
    main()
