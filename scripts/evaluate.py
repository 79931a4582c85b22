"""Evaluate a payload: ``python scripts/evaluate.py payload=outputs/latest/tenants/libero episodes=20``.

Keys: payload (folder of a tenant or of one version), episodes, first_seed, num_envs, video (an .mp4 path), json (path).
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # models/ and envs/ live beside scripts/


@dataclass
class Arguments:
    payload: str = MISSING
    episodes: int = 20
    first_seed: int = 0
    num_envs: int = 1
    video: str | None = None
    json: str | None = None


def parse(arguments: list[str]) -> Arguments:
    try:
        args = OmegaConf.merge(OmegaConf.structured(Arguments), OmegaConf.from_dotlist(arguments))
        if OmegaConf.is_missing(args, "payload"):
            raise ValueError("payload=<folder> is required")
        result = OmegaConf.to_object(args)
    except (OmegaConfBaseException, ValueError) as error:
        raise SystemExit(f"error: {error}\n{__doc__}") from None
    assert isinstance(result, Arguments)
    return result


def main() -> None:
    args = parse(sys.argv[1:])
    from nexus_lightning.evaluation import evaluate
    from nexus_lightning.policy import load_policy
    from nexus_lightning.producers.evaluation import result_dict

    policy = load_policy(args.payload)
    seeds = list(range(args.first_seed, args.first_seed + args.episodes))
    with tqdm(total=len(seeds), desc=policy.slot.name, unit="episode") as bar:

        def progress(finished: int) -> None:
            bar.update(finished - bar.n)

        video = None if args.video is None else Path(args.video)
        result = evaluate(policy, seeds, args.num_envs, video, progress)
    marked = f" (privileged: {', '.join(policy.schema.privileged)})" if policy.schema.privileged else ""
    print(
        f"{result.tenant} v{result.policy_version}{marked}: success {result.success_rate:.1%} "
        f"[{result.ci_low:.1%}, {result.ci_high:.1%}] n={result.n}, return {result.episode_return:.3f}, "
        f"length {result.episode_length:.1f}"
    )
    if args.json is not None:
        Path(args.json).write_text(json.dumps(result_dict(result), indent=2))


if __name__ == "__main__":
    main()
