"""The memory of the host that loading a base takes, sampled from outside a process that loads it.

    python benchmarks/load_memory.py MODEL_DIR BACKEND QUANTIZATION DTYPE

Anonymous memory (RssAnon of /proc/PID/status, on Linux) is what a process really needs: pages of mapped files are
dropped when memory is short. The process has imported its framework and trained a tiny model before it is measured.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from dualtune.adapter.spec import AdapterSpec
from dualtune.backend import LoadRequest, get_backend
from dualtune.optimizer import OptimizerSpec
from dualtune.testing.tiny_models import write_tiny_llama

EVERY_S = 0.003


def measure(model_dir: Path, backend: str, quantization: str, dtype: str) -> dict[str, Any]:
    """Return the peak during the load and what stays after it, in bytes above the process before the load."""
    command = [sys.executable, __file__, str(model_dir), backend, quantization, dtype]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as child:
        assert child.stdin is not None and child.stdout is not None
        if child.stdout.readline() != "ready\n":
            raise RuntimeError(f"{command} has failed")
        start, loaded, said = resident(child.pid), threading.Event(), []
        threading.Thread(target=lambda: (said.append(child.stdout.readline()), loaded.set()), daemon=True).start()
        print("load", file=child.stdin)
        peak = dict(start)
        while not loaded.is_set():
            peak = {kind: max(size, peak[kind]) for kind, size in resident(child.pid).items()}
            time.sleep(EVERY_S)
        end = resident(child.pid)
        print("exit", file=child.stdin)
    above = {
        "peak_anonymous_bytes": peak["RssAnon"] - start["RssAnon"],
        "final_anonymous_bytes": end["RssAnon"] - start["RssAnon"],
        "peak_mapped_bytes": peak["RssFile"] - start["RssFile"],
    }
    return above | json.loads(said[0])


def has_status() -> bool:
    return Path("/proc/self/status").exists()


def resident(pid: int) -> dict[str, int]:
    """Return the resident bytes of a process by kind."""
    lines = [line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return {line[0].rstrip(":"): int(line[1]) << 10 for line in lines if line[0] in ("RssAnon:", "RssFile:")}


def load_when_told(model_dir: Path, name: str, quantization: str, dtype: str) -> None:
    """The measured process."""
    backend = get_backend(name, "cpu")

    def load(path: Path) -> Any:
        spec = AdapterSpec(1, 1.0, 0.0, ("q_proj",))
        return backend.load(
            LoadRequest(path, dtype, quantization, "pretrained", spec, OptimizerSpec(), seed=1, kernels="reference")
        )

    with tempfile.TemporaryDirectory() as place:
        load(write_tiny_llama(Path(place) / "model"))
    gc.collect()
    print("ready", flush=True)
    sys.stdin.readline()
    engine = load(model_dir)
    stored = engine.description.adapted_weights
    print(json.dumps({"adapted_bytes": stored["bytes"], "adapted_parameters": stored["parameters"]}), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    load_when_told(Path(sys.argv[1]), *sys.argv[2:])
