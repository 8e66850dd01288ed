"""The table in benchmarks/results/faults.md says what these tests prove: no fault more, none less."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "benchmarks" / "results" / "faults.md"
ROWS = {
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    9,
    10,
    11,
    14,
    16,
    18,
    19,
    20,
    21,
    26,
    27,
    28,
    29,
    30,
    32,
    33,
    34,
    35,
    40,
    41,
    46,
    47,
    48,
    49,
    50,
    51,
}


def test_the_table_lists_the_faults_that_are_collected(python):
    result = python(ROOT / "scripts" / "reliability_table.py", "--check")
    assert result.returncode == 0, f"run `make reliability`:\n{result.stdout}{result.stderr}"


def test_every_fault_is_covered_and_none_ended_badly():
    _, _, rest = PAGE.read_text(encoding="utf-8").partition("<!-- faults:begin -->")
    lines = rest.partition("<!-- faults:end -->")[0].strip().splitlines()[2:]
    assert {int(re.match(r"\| (\d+) \|", line)[1]) for line in lines} == ROWS
    assert not [line for line in lines if "failed" in line.rpartition("|")[0].rpartition(" | ")[2]]
