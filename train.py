"""Compose the configuration, run it: ``python train.py '+tenants=[libero,maniskill]'``."""

import logging
import math
import os
import sys
import traceback
import warnings
from pathlib import Path

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nexus_lightning.config import (
    NULL_ERRORS,
    ConfigError,
    composition_error,
    hydra_overrides,
    optional_overrides,
    register_configs,
    to_config,
)
from nexus_lightning.monitoring.lines import disk_refuses

CONF = Path(__file__).parent / "conf"
#: Overrides of the trials of a multirun that were refused, ended in quarantine or broke off, in this process.
FAILED_TRIALS: list[str] = []

register_configs()


class Quarantined(Exception):
    """The run is over, but not for all tenants."""


class TrialFailed(Exception):
    """Told before; what Hydra needs to hear to go on with the next trial."""


def may_restart() -> bool:
    """Whether torchrun starts all ranks again when one ends with another code than 0 (``--max-restarts``).

    A run that has ended with a tenant in quarantine is over: its other tenants have met their targets, and a restart
    would only let the same tenant fail again. Then the code is 0; stderr and ``summary.json`` say who failed.
    """
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float | None:
    """Returns the tenants' mean success rate, which a Hydra sweeper may maximise. A run that fails ends the process;
    a trial of a multirun does not."""
    try:
        return run(cfg)
    except ConfigError as error:
        failure, code = f"error: {error}", 2
    except Quarantined as error:
        failure, code = str(error), 1
    except OSError as error:
        full = f"error: {error}; make room, then ckpt_path=last goes on from what was saved"
        failure, code = full if disk_refuses(error) else traceback.format_exc(), 1
    except Exception:
        failure, code = traceback.format_exc(), 1
    print(failure, file=sys.stderr, flush=True)
    settings = HydraConfig.get()
    if settings.mode != RunMode.MULTIRUN:
        raise SystemExit(code)
    FAILED_TRIALS.append(" ".join(settings.overrides.task))
    print(f"trial {settings.job.num} has failed: {FAILED_TRIALS[-1]}", file=sys.stderr, flush=True)
    # Optuna's sweeper ends the whole study at an exception: it is told the worst value there is.
    worst = {"maximize": -math.inf, "minimize": math.inf}.get(OmegaConf.select(settings.sweeper, "direction"))
    if worst is None:
        raise TrialFailed(FAILED_TRIALS[-1])
    return worst


def run(cfg: DictConfig) -> float | None:
    """One run of a composed configuration.

    Raises:
        ConfigError: it cannot run.
        Quarantined: with the tenants that failed, and why.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    # advice to the developers of the libraries
    warnings.filterwarnings("ignore", module=r"(lightning|torchrl|torch|tensordict)\.")
    hydra_config = HydraConfig.get()
    folders = [Path(source.path) for source in hydra_config.runtime.config_sources if source.schema == "file"]
    config = to_config(cfg, folders, overrides=hydra_config.overrides.task)
    from torch.distributed.elastic.multiprocessing.errors import record

    from nexus_lightning.trainer import train  # lightning and torchrl take seconds: bad keys fail before that

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    summary = record(train)(config) if "TORCHELASTIC_RUN_ID" in os.environ else train(config)
    assert summary is not None
    if config.trainer.dry_run or os.environ.get("RANK", "0") != "0":
        return None  # rank 0 speaks for all
    print(summary["run_dir"], flush=True)
    tenants = summary["tenants"]
    if failed := [f"tenant {n} was quarantined: {t['quarantined']}" for n, t in tenants.items() if t["quarantined"]]:
        if not may_restart():
            raise Quarantined("\n".join(failed))
        print("\n".join(failed), file=sys.stderr)
    rates = [t["eval"]["success_rate"] for t in tenants.values() if t["eval"] is not None]
    return sum(rates) / len(rates) if rates else None


def command_line() -> int:
    """Exit code: 0, 1 with a tenant in quarantine, 2 when refused; of a multirun 1 when any trial has failed."""
    sys.argv[1:] = hydra_overrides(sys.argv[1:])
    debug = "HYDRA_FULL_ERROR" in os.environ
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here: Hydra's own report advises to use + and ends with 1
    try:
        try:
            main()
        except NULL_ERRORS:  # main() tells its own: an override of a part of what is null does not compose
            words = get_args_parser().parse_args()
            overrides = words.overrides
            rewritten = optional_overrides(CONF, overrides, [Path(words.config_dir)] if words.config_dir else [])
            if debug or rewritten == overrides:
                raise
            sys.argv[1:] = [word for word in sys.argv[1:] if word not in overrides] + rewritten
            main()
    except TrialFailed as error:
        FAILED_TRIALS[:] = FAILED_TRIALS or [str(error)]  # a launcher may run trials in other processes
    except (HydraException, OmegaConfBaseException, AssertionError, AttributeError) as error:
        # main() tells its own: this command line does not compose. OmegaConf asserts that no part of null is set.
        if debug:
            raise
        words = get_args_parser().parse_args()
        more = [] if words.config_dir is None else ["--config-dir", words.config_dir]
        print(f"error: {composition_error(error, CONF, [*more, *words.overrides])}", file=sys.stderr)
        return 2
    for trial in FAILED_TRIALS:
        print(f"failed: {trial}", file=sys.stderr)
    return int(bool(FAILED_TRIALS))


if __name__ == "__main__":
    raise SystemExit(command_line())
