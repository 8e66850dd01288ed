"""Profile MLX: a capture of Metal's commands, for Xcode."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from dualtune.engine.backend import Profile
from dualtune_mlx.runtime import chip

SWITCH = "MTL_CAPTURE_ENABLED"  # Apple's variable: without it a process may not capture


def profile(work: Callable[[], object], trace: Path) -> Profile:
    """Call `work` under Metal's capture, which contains every used buffer and is as large as the model."""
    if chip() is None:
        return Profile(None, "MLX has a profiler only on Metal", {})
    if os.environ.get(SWITCH) != "1":
        return Profile(None, f"to record a Metal capture, set {SWITCH}=1", {})
    shutil.rmtree(trace, ignore_errors=True)  # a capture is a directory, and Metal does not replace it
    mx.metal.start_capture(str(trace))
    try:
        work()
    finally:
        mx.metal.stop_capture()
    return Profile(trace, "open it in Xcode", {})
