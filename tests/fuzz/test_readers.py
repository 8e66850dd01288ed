"""Every reader of foreign files among hostile inputs, and whether the judge of them can tell."""

import json
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).with_name("fuzz_readers.py")


def run(python, tmp_path, *options, before=""):
    """The program in a process of its own, after a change to what it judges."""
    program = (
        f"import runpy, sys\nsys.path.insert(0, {str(FUZZ.parent)!r})\n{before}\n"
        f"sys.argv = ['fuzz', *{list(map(str, options))!r}]\nrunpy.run_path({str(FUZZ)!r}, run_name='__main__')\n"
    )
    return python("-c", program, cwd=tmp_path, timeout=3000)


def test_no_reader_breaks_a_promise(python, tmp_path):
    done = run(python, tmp_path, "--inputs", 500, "--seed", 5, "--few-large")
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    for reader, refused, accepted in (("adapter", 50, 25), ("checkpoint", 25, 5), ("base model", 7, 7),
                                      ("bundle list", 25, 0), ("config", 5, 2), ("template", 5, 1)):  # fmt: skip
        assert counts[f"{reader} refused"] > refused and counts[f"{reader} accepted"] > accepted, counts


@pytest.mark.fuzz
def test_no_reader_breaks_a_promise_a_hundred_thousand_times(python, tmp_path):
    done = run(python, tmp_path, "--inputs", 100_000, "--seed", 11)
    assert done.returncode == 0, done.stderr


MUTATIONS = {  # a reader that is less careful -> what is said of it
    "a header may hold anything": (
        "from dualtune.base import untrusted\nimport large\nuntrusted.MAX_STRUCTURE = large.MAX_STRUCTURE = 5_000_000",
        ("--inputs", 0, "--few-large"), "AssertionError: needed ",
    ),
    "JSON may be as deep as Python can": (
        "from dualtune.base import untrusted\nuntrusted._is_deep = lambda table: False\n"
        "def surprise(*args):\n    raise RecursionError\nfiles._too_deep = surprise",
        ("--inputs", 300, "--only", "adapter", "--few-large"), "RecursionError",
    ),
    "a message shows what the file holds": (
        "from dualtune.base import fields\nfrom dualtune.base.errors import FormatError\n"
        "fields.wrong = lambda where, key, value, allowed: FormatError(f'{key}: got {value}')",
        ("--inputs", 1000, "--only", "adapter", "--few-large"), "isprintable",
    ),
    "a reader writes beside its target": (
        "import readers\nread = readers.read_a_checkpoint\n"
        "def write(place, out, draw):\n    (out.parent / 'beside').touch()\n    read(place, out, draw)\n"
        "readers.READERS['checkpoint'] = readers.READERS['checkpoint']._replace(read=write)",
        ("--inputs", 1, "--only", "checkpoint", "--few-large"), "written outside of the target",
    ),
    "a pattern may take for ever": (
        "import re\nfrom dualtune.model.formats import patterns, peft\n"
        "peft.full_match = lambda pattern, text, where: bool(re.fullmatch(r'(\\w|\\w)*!', 'a' * 40))",
        ("--inputs", 50, "--only", "adapter", "--few-large"), "took too long",
    ),
}  # fmt: skip


@pytest.mark.fuzz
@pytest.mark.parametrize("case", MUTATIONS)
def test_a_promise_that_is_broken_is_seen(python, tmp_path, case):
    if sys.platform != "linux":
        pytest.skip("needs /proc")
    before, options, said = MUTATIONS[case]
    done = run(python, tmp_path, *options, before=before)
    assert done.returncode != 0 and said in done.stderr, done.stderr[-2000:]
