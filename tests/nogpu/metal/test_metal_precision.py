"""Which precision MLX computes in on Apple's GPUs: float32 without TF32, and bfloat16 where it is emulated."""

import importlib
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from dualtune.doctor.check_env import TARGETS, metal_checks
from dualtune.engine.card import card_of
from dualtune.engine.machines import named
from dualtune.engine.problems import problems

mx = pytest.importorskip("mlx.core")
model = importlib.import_module("dualtune_mlx.model")
precision = importlib.import_module("dualtune_mlx.runtime")
chips = importlib.import_module("dualtune_mlx.card.checks")

# Imports one module in a new process, and prints the variable as it is when MLX is first imported.
WATCH = """
import os, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "mlx.core":
            print("imported with", os.environ.get("MLX_ENABLE_TF32"))
sys.meta_path.insert(0, Watch())
import importlib
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def imported_with(*modules, **environment):
    """What the variable is when MLX is imported by these modules, in a process without it but for `environment`."""
    without = {name: value for name, value in os.environ.items() if name != chips.TF32}
    return subprocess.run(
        [sys.executable, "-c", WATCH, *modules], env=without | environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def test_mlx_is_imported_with_exact_float32():
    """Whichever module is imported first: `dualtune_mlx/__init__.py` comes before it."""
    assert imported_with("dualtune_mlx.lora") == ["imported with 0"]


def test_what_the_user_has_set_stays():
    assert imported_with("dualtune_mlx.lora", MLX_ENABLE_TF32="1") == ["imported with 1"]


# --- what is said ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "setting"), [("0", "0"), ("1", "1"), (" 2", "1"), ("", "0"), ("false", "0"), (None, "1")]
)
def test_the_variable_is_read_as_mlx_reads_it(value, setting, monkeypatch):
    monkeypatch.delenv(chips.TF32, raising=False)
    if value is not None:
        monkeypatch.setenv(chips.TF32, value)
    assert chips.tf32_setting() == setting


def test_a_rounded_product_is_seen(monkeypatch):
    """This device computes exactly; a factor a little below 1 stands for one that does not."""
    monkeypatch.setenv(chips.TF32, "0")
    assert precision.describe_products() == "its products are exact (MLX_ENABLE_TF32=0)"
    monkeypatch.setattr(mx, "eye", lambda n: mx.diag(mx.full(n, 1 - 2**-11)))
    assert not precision.are_exact()
    assert "rounded (MLX_ENABLE_TF32=0 came too late" in precision.describe_products()
    monkeypatch.setenv(chips.TF32, "1")
    assert precision.describe_products() == "its products are rounded (MLX_ENABLE_TF32=1)"


@pytest.mark.parametrize(
    ("asked", "chip", "dtype", "reason"),
    [
        ("auto", "Apple M1 Max", "bfloat16", "range of float32.*Apple M1 Max has no bfloat16.*dtype: float16 would"),
        ("auto", "Apple M2", "bfloat16", "Apple M2 has no bfloat16"),
        ("auto", "Apple M3", "bfloat16", "the range of float32, and the default on NVIDIA too$"),
        ("auto", "Apple M10", "bfloat16", "NVIDIA too$"),
        ("auto", "Apple Paravirtual device", "bfloat16", "NVIDIA too$"),
        ("auto", None, "float32", "MLX on a CPU has no fast half precision$"),
        ("float16", "Apple M1", "float16", "^as configured$"),
        ("bfloat16", "Apple M1", "bfloat16", "^as configured; Apple M1 has no bfloat16"),
        ("float32", "Apple M5", "float32", r"^as configured; its products are exact \(MLX_ENABLE_TF32=0\)$"),
        ("float32", None, "float32", "^as configured$"),
    ],
)  # fmt: skip
def test_the_dtype_and_why(asked, chip, dtype, reason, monkeypatch):
    monkeypatch.setenv(chips.TF32, "0")
    found, why = model.choose_dtype(asked, chip)
    assert str(found) == f"mlx.core.{dtype}"
    assert re.search(reason, why), why


def rows(machine):
    return {row.name: row for row in metal_checks(machine, TARGETS["m4"], card_of("mlx"))}


def test_check_env_and_check_gpu_say_it(monkeypatch):
    monkeypatch.setenv(chips.TF32, "0")
    old, new = named("m1-16"), named("m4-32")
    assert rows(new)["bfloat16"].found == "Apple M4 computes it"
    assert rows(old)["bfloat16"].level == "advice" and "float16" in rows(old)["bfloat16"].fix
    assert [row.name for row in problems(old)] == ["bfloat16"] and problems(new) == []
    assert rows(new)["float32"].level == "ok"
    monkeypatch.setenv(chips.TF32, "1")
    assert (rows(new)["float32"].level, rows(new)["float32"].fix[:21]) == ("advice", "unset MLX_ENABLE_TF32")
    linux = replace(old, system="Linux")
    assert problems(linux) == []
