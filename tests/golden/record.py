"""Record the golden runs again: ``python tests/golden/record.py [name ...]`` (no name: all of them).

When that is allowed: a commit changes the maths, the order of what a tenant draws, or what is logged, *and its message
says which of these and why*. The diff of the JSON files is part of that commit and must show nothing else: digests of
runs that the change does not concern stay. A refactoring records nothing. A new version of torch, or another machine to
record on, is a commit of its own, with losses that agree with the old ones within the test's tolerance.

Every run is played three times, once beside a busy process, and recorded only if all three agree bit for bit.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from dist.launch import run_ranks  # noqa: E402
from golden.runs import RUNS, machine, overrides, path_of, written  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(RUNS)}")
    names = parser.parse_args().names or list(RUNS)
    if unknown := set(names) - set(RUNS):
        parser.error(f"there is no golden run {', '.join(sorted(unknown))}; there are {', '.join(RUNS)}")
    played = {size: _played(size, names) for size in (1, 2)}
    for name in names:
        ranks = {str(size): runs[name] for size, runs in played.items()}
        golden = {"machine": machine(), "overrides": overrides(name), "ranks": ranks}
        path_of(name).write_text(written(golden))
        print(path_of(name))


def _played(size: int, names: list[str]) -> dict[str, dict]:
    times = []
    for busy in (False, True, False):
        burner = multiprocessing.get_context("spawn").Process(target=_burn, daemon=True)
        if busy:
            burner.start()
        with tempfile.TemporaryDirectory() as folder:
            times += run_ranks("golden.runs:play", size, Path(folder), *names, deadline_s=600)
        if busy:
            burner.kill()
            burner.join()
    for name in names:
        if any(run[name] != times[0][name] for run in times):
            raise SystemExit(f"{name} on {size} rank(s) gives other bits when it is repeated: nothing is recorded")
    return times[0]


def _burn() -> None:
    while True:
        pass


if __name__ == "__main__":
    main()
