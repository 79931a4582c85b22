"""Make report.html and report.png of a run folder again (also of an interrupted run).

Example:
    python scripts/report.py outputs/latest
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without an installed package, as the others do

from nexus_lightning.monitoring.report import write_report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", help="run folder with metrics.csv, events.jsonl, summary.json, config.yaml"
    )
    arguments = parser.parse_args()
    try:
        print(write_report(arguments.run_dir))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
