"""Whether an MLX is new enough, by what it has."""

import ast
import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from dualtune.base.errors import EnvironmentFault

mx = pytest.importorskip("mlx.core")
features = importlib.import_module("dualtune_mlx.runtime")
ROOT = Path(__file__).parents[3]


def dotted(node):
    """The parts of `mx.a.b`, outermost first; nothing for other expressions."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return parts[::-1] if isinstance(node, ast.Name) and node.id == "mx" else []


def named_in(source):
    """What of `mlx.core` a file names: the longest attributes, without methods and members of classes."""
    names = {".".join(found) for node in ast.walk(ast.parse(source)) if (found := dotted(node))}
    names = {re.sub(r"^DeviceType\..*", "DeviceType", name) for name in names}
    return {name for name in names if not any(other.startswith(f"{name}.") for other in names)}


def test_the_list_is_what_the_backend_names():
    files = (ROOT / "backends/dualtune_mlx").rglob("*.py")
    assert set(features.NEEDED) == set().union(*(named_in(file.read_text()) for file in files))
    assert named_in("x: mx.array = mx.fast.f(mx.DeviceType.cpu).shape") == {"array", "fast.f", "DeviceType"}


def test_this_mlx_has_it_all_and_an_older_one_is_named():
    features.check_features()
    lacking = {"device_info", "new_thread_local_stream", "fast"}
    old = SimpleNamespace(fast=None, **{name: getattr(mx, name) for name in dir(mx) if name not in lacking})
    old.__version__ = "0.30.3"
    with pytest.raises(EnvironmentFault) as error:
        features.check_features(old)
    assert str(error.value).startswith(
        "MLX 0.30.3 lacks mlx.core.device_info, mlx.core.fast.rms_norm, mlx.core.fast.scaled_dot_product_attention, "
        "mlx.core.new_thread_local_stream, which dualtune needs."
    )
    assert f">={features.LEAST_MLX}'" in str(error.value)


def test_the_version_in_the_message_is_the_one_that_is_required():
    project = (ROOT / "pyproject.toml").read_text()
    assert set(re.findall(r'"mlx(?:\[cpu\])?>=([\d.]+);', project)) == {features.LEAST_MLX}
