"""Modules by the names that they had before the ten rooms."""

import importlib
import sys

import pytest

from dualtune.base.moved import MOVED


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_an_old_name_is_the_module_itself(old, new):
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=new):
        module = importlib.import_module(old)
    assert module is sys.modules[new] and module.__name__ == new


def test_what_never_was_is_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"dualtune\.nothing"):
        importlib.import_module("dualtune.nothing")
