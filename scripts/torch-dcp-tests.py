"""Runs torch's own distributed-checkpoint tests with torch's storage and with ours, and prints the table.

    scripts/torch-dcp-tests.py <a checkout of pytorch> [name of a test file ...]

The checkout needs `test/distributed/checkpoint` only; torch is the installed one. The tests import `expecttest`
(`pip install expecttest`). Nothing of the checkout is changed or kept. Each file runs in a process of its own, twice
with each storage: as it is (on a machine without GPUs most skip), and with GPU tests on the CPU over gloo.

Used for the table in docs/compatibility.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
SITE = """\
import sys
sys.path[:0] = [{scripts!r}, {repository!r}]
import torch_dcp_stand_ins
torch_dcp_stand_ins.install()
"""


def main() -> int:
    """The table on standard output; tests that pass with torch's storage alone decide the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("names", nargs="*", help="test files, below test/distributed/checkpoint")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one file with one storage")
    options = parser.parse_args()
    folder = options.checkout / "test" / "distributed" / "checkpoint"
    names = options.names or sorted(str(path.relative_to(folder)) for path in folder.rglob("test_*.py"))
    if not names:
        print(f"{folder}: no tests here", file=sys.stderr)
        return 2
    worse: list[str] = []
    print("| file | tests | passed, torch's storage | passed, ours | skipped, ours | only torch's passes |")
    print("|---|---|---|---|---|---|")
    for name in names:
        theirs = run(folder / name, "theirs", options.timeout)
        ours = run(folder / name, "ours", options.timeout)
        lost = sorted(test for test, outcome in theirs.items() if outcome == "passed" and ours.get(test) == "failed")
        worse += lost
        one, two = Counter(theirs.values()), Counter(ours.values())
        print(
            f"| {name} | {len(theirs)} | {one['passed']} | {two['passed']} | {two['skipped']} | {', '.join(lost)} |",
            flush=True,
        )
    return 1 if worse else 0


def run(test_file: Path, storage: str, timeout: float) -> dict[str, str]:
    """Name of each test -> ``passed``, ``failed`` or ``skipped``."""
    with tempfile.TemporaryDirectory() as scratch:
        # Their ranks are spawned processes, which know of no pytest plugin: Python itself imports this one.
        Path(scratch, "sitecustomize.py").write_text(
            SITE.format(scripts=str(HERE), repository=str(HERE.parent)), encoding="utf-8"
        )
        report = Path(scratch, "report.xml")
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([scratch, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "CKPT_STAND_IN": storage,
            "CKPT_ON_CPU": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
        command += ["-c", os.devnull, "--rootdir", str(test_file.parent), f"--junitxml={report}", str(test_file)]
        log = Path(os.environ.get("CKPT_LOGS", scratch), f"{test_file.stem}.{storage}.log")
        with log.open("w", encoding="utf-8") as output:
            try:
                subprocess.run(
                    command,
                    env=environment,
                    cwd=test_file.parent,
                    stdout=output,
                    stderr=output,
                    timeout=timeout,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                print(f"{test_file.name}: no end within {timeout:g} s with {storage}", file=sys.stderr)
        return outcomes(report) if report.exists() else {}


def outcomes(report: Path) -> dict[str, str]:
    """Reads pytest's JUnit report of our own run."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        found[name] = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
    return found


if __name__ == "__main__":
    sys.exit(main())
