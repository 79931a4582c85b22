"""Compose the configuration, run it: ``python train.py '+tenants=[libero,maniskill]'``."""

import logging
import os
import sys
import warnings
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from nexus_lightning.config import ConfigError, head_overrides, register_configs, to_config
from nexus_lightning.monitoring.lines import disk_refuses

register_configs()


def may_restart() -> bool:
    """Whether torchrun starts all ranks again when one ends with another code than 0 (``--max-restarts``).

    A run that has ended with a tenant in quarantine is over: its other tenants have met their targets, and a restart
    would only let the same tenant fail again. Then the code is 0; stderr and ``summary.json`` say who failed.
    """
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float | None:
    """Returns the tenants' mean success rate, which a Hydra sweeper may maximise."""
    try:
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
        # advice to the developers of the libraries
        warnings.filterwarnings("ignore", module=r"(lightning|torchrl|torch|tensordict)\.")
        overrides = HydraConfig.get().overrides.task
        config = to_config(cfg, head_dir=Path(__file__).parent / "conf" / "head", overrides=overrides)
        from torch.distributed.elastic.multiprocessing.errors import record

        from nexus_lightning.trainer import train  # lightning and torchrl take seconds: bad keys fail before that

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

        summary = record(train)(config) if "TORCHELASTIC_RUN_ID" in os.environ else train(config)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as error:
        if not disk_refuses(error):
            raise
        print(f"error: {error}; make room, then ckpt_path=last goes on from what was saved", file=sys.stderr)
        raise SystemExit(1) from None
    if config.trainer.dry_run or os.environ.get("RANK", "0") != "0":
        return None  # rank 0 speaks for all
    failed = {name: t["quarantined"] for name, t in summary["tenants"].items() if t["quarantined"]}
    for name, reason in failed.items():
        print(f"tenant {name} was quarantined: {reason}", file=sys.stderr)
    print(summary["run_dir"], flush=True)
    if failed and not may_restart():
        raise SystemExit(1)
    rates = [t["eval"]["success_rate"] for t in summary["tenants"].values() if t["eval"] is not None]
    return sum(rates) / len(rates) if rates else None


if __name__ == "__main__":
    sys.argv[1:] = head_overrides(sys.argv[1:])
    main()
