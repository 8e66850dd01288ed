"""Write what reliability rests on: run tests/faults, record how each fault ended, and show two results.

The faults are the table of benchmarks/results/faults.md; each line is a fault that tests declare (@pytest.mark.fault),
and several tests, and several parameters of one, may share it. The results, in docs/reliability.md, are those of
`make chaos` and benchmarks/checkpoint_overhead.py, stored in benchmarks/results. `make reliability` runs this;
`--check` runs nothing and compares.
"""

import argparse
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reliability.md"
RESULTS = ROOT / "benchmarks" / "results"
FAULTS = RESULTS / "faults.md"
BEGIN, END = "<!-- faults:begin -->", "<!-- faults:end -->"
HEAD = ["| row | fault | injection | what happens | result |", "|---:|---|---|---|---|"]


class Collector:
    """A pytest plugin that collects the declared faults and how they ended."""

    def __init__(self) -> None:
        self.faults: dict[tuple[int, str, str, str], list[str]] = {}  # -> the tests
        self.outcomes: dict[str, tuple[str, str]] = {}  # test -> (outcome, reason)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for mark in item.iter_markers("fault"):
                fault = (mark.kwargs["row"], *(mark.kwargs[key] for key in ("fault", "injection", "expected")))
                self.faults.setdefault(fault, []).append(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            known = hasattr(report, "wasxfail")
            reason = report.wasxfail if known else report.longrepr[2] if report.skipped else ""
            before = self.outcomes.get(report.nodeid, ("passed", ""))
            if before[0] == "passed":  # a failing teardown counts, but not after another failure
                self.outcomes[report.nodeid] = ("known" if known else report.outcome, str(reason))

    def lines(self) -> list[tuple[str, str]]:
        """Return (declaration, outcome) of every fault, by row."""
        return [
            (" | ".join(map(_cell, fault)), _cell(self._result(tests)))
            for fault, tests in sorted(self.faults.items(), key=lambda entry: entry[0][0])
        ]

    def _result(self, tests: list[str]) -> str:
        found = [self.outcomes.get(test, ("not run", "")) for test in tests]
        text = f"{sum(outcome == 'passed' for outcome, _ in found)} of {len(found)} passed"
        reasons = sorted({(outcome, reason) for outcome, reason in found if outcome != "passed"})
        names = {"known": "known weakness", "skipped": "not run here"}
        return "; ".join(
            [text, *(f"{names.get(o, o)}{': ' if r else ''}{r.removeprefix('Skipped: ')}" for o, r in reasons)]
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="run nothing; exit 1 if the table lists other faults")
    check = parser.parse_args().check
    collector = Collector()
    tests = ROOT / "tests" / "faults"
    options = ["--collect-only", "-qqq"] if check else ["-q"]
    options += [
        "-m",
        "",
        "-p",
        "no:cacheprovider",
        f"--ignore={tests / 'test_table.py'}",
    ]  # it checks the table written here
    code = pytest.main([str(tests), *options], [collector])
    page = PAGE.read_text(encoding="utf-8")
    figures = {"chaos": chaos_table(), "overhead": overhead_table()}
    if check:
        table = FAULTS.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
        stale = [name for name, lines in figures.items() if _with(page, name, lines) != page]
        print("\n".join(f"differs from benchmarks/results: {name}" for name in stale))
        declared = [line for line, _ in collector.lines()]
        listed = [line.strip("| ").rpartition(" | ")[0] for line in table.strip().splitlines()[len(HEAD) :]]
        for line in sorted({*declared} ^ {*listed}):
            print(("not in the table: " if line in declared else "only in the table: ") + line)
        return int(code) or int(declared != listed or bool(stale))
    rows = [*HEAD, *(f"| {fault} | {result} |" for fault, result in collector.lines())]
    FAULTS.write_text(_with(FAULTS.read_text(encoding="utf-8"), "faults", rows), encoding="utf-8")
    for name, lines in figures.items():
        page = _with(page, name, lines)
    PAGE.write_text(page, encoding="utf-8")
    return int(code)


def chaos_table() -> list[str]:
    found = json.loads((RESULTS / "chaos.json").read_text(encoding="utf-8"))
    columns = ["trials", "resumed", "lost", "corrupted", "not bitwise"]
    rows = [[name, *(str(row[column]) for column in columns)] for name, row in found["backends"].items()]
    kills = sum(row["kills"] for row in found["backends"].values())
    return [
        *_markdown(["backend", *columns], rows),
        "",
        f"{found['date']}, {found['machine']}, seed {found['seed']}, {kills} kills; their places are in "
        "`benchmarks/results/chaos.json`.",
    ]


def overhead_table() -> list[str]:
    found = json.loads((RESULTS / "checkpoint_overhead.json").read_text(encoding="utf-8"))
    saving, start = found["saving"], found["start"]
    ratio, low, high = (start[key] for key in ("median_ratio", "lowest_ratio", "highest_ratio"))
    spread = f"from {low:.2f} to {high:.2f} in {len(start['fresh_s'])} pairs"
    machine = f"{found['machine']['system']}, {found['machine']['cores']} cores"
    rows = [
        ["one save", f"{max(saving['save_s']):.2f} s for {saving['checkpoint_bytes'] / 2**20:.0f} MiB"],
        ["saving, share of a run with `save_every: 100`", f"{saving['share']:.2%}"],
        [
            "start to first step, resumed / fresh",
            f"{ratio:.2f} ({spread})",
        ],
    ]
    return [
        *_markdown(["", found["model"] + ", " + found["adapter"]], rows),
        "",
        f"{found['date']}, platform {found['platform']}, {machine}, {saving['step_s']:.1f} s a step; "
        "`benchmarks/checkpoint_overhead.py`.",
    ]


def _markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def _with(page: str, name: str, lines: list[str]) -> str:
    """Return the page with these lines between the marks of a name."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, _, rest = page.partition(begin)
    return before + "\n".join([begin, *lines, end]) + rest.partition(end)[2]


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
