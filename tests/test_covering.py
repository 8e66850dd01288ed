"""The few cases of a test that run for every push have what `covering` promises, and the others are not lost."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest

HERE = Path(__file__)


class Case(SimpleNamespace):
    def iter_markers(self, name):
        return iter(self.marks)


@pytest.fixture
def conftest(request):
    return request.config.pluginmanager.get_plugin(str(HERE.with_name("conftest.py")))


def cases(*axes, marks=()):
    names = "abcd"[: len(axes)]
    return [
        Case(callspec=SimpleNamespace(params=dict(zip(names, values, strict=True))), marks=marks)
        for values in itertools.product(*axes)
    ]


@pytest.mark.parametrize(("strength", "most"), [(1, 4), (2, 14), (3, 36), (9, 36)])
def test_each_combination_of_so_many_values_is_there(conftest, strength, most):
    all_cases = cases("xyz", "uvw", [0, 1, 2, 3])
    chosen = conftest.covering(all_cases, strength)
    assert len(chosen) <= most and len({*map(id, chosen)}) == len(chosen)
    for names in itertools.combinations("abc", min(strength, 3)):
        there, possible = (
            {tuple(case.callspec.params[name] for name in names) for case in some} for some in (chosen, all_cases)
        )
        assert there == possible


def test_values_that_stand_together_are_one(conftest):
    """parametrize(("a", "b"), …) is a list of pairs that somebody has chosen."""
    together = SimpleNamespace(args=("a, b",))
    assert len(conftest.covering(cases("xy", "uv", marks=[together]), 1)) == 4
    assert len(conftest.covering(cases("xy", "uv"), 1)) == 2


def test_one_parameter_has_all_its_values(conftest):
    assert len(conftest.covering(cases("xyz"), 2)) == 3
