"""Export a policy for use elsewhere: ``python scripts/export.py payload=outputs/latest/tenants/libero out=exported``.

Writes a folder without optimizer state that ``nexus_lightning.policy.load_policy`` reads, and checks it by loading.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # models/ and envs/ live beside scripts/


@dataclass
class Arguments:
    payload: str = MISSING
    out: str = MISSING


def main() -> None:
    try:
        args = OmegaConf.merge(OmegaConf.structured(Arguments), OmegaConf.from_dotlist(sys.argv[1:]))
        missing = OmegaConf.missing_keys(args)
        if missing:
            raise ValueError(f"{', '.join(sorted(missing))}: a value is required")
    except (OmegaConfBaseException, ValueError) as error:
        raise SystemExit(f"error: {error}\n{__doc__}") from None
    from nexus_lightning.policy import export_policy, load_policy

    out = export_policy(args.payload, args.out)
    policy = load_policy(out)
    size = sum(p.numel() for p in policy.slot.head.parameters())
    print(f"{policy.slot.name} v{policy.slot.policy_version}: {size} parameters, {out}")


if __name__ == "__main__":
    main()
