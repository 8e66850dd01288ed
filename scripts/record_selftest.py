"""Write dualtune/doctor/selftest/recorded anew: what the self-test compares every machine with.

    python scripts/record_selftest.py [--output DIRECTORY]

Trains on the CPU, in float32, by torch and by MLX; both have to be installed. Takes half a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import tempfile
from pathlib import Path

from dualtune.doctor.selftest.case import SIZES, Site
from dualtune.doctor.selftest.correctness import RECORDED, record
from dualtune.doctor.selftest.run import DEMO
from dualtune.engine.backend import get_backend
from dualtune.engine.card import card_of

BACKENDS = ("torch", "mlx")  # the checkpoint and the adapter are those of the first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=RECORDED)
    output: Path = parser.parse_args().output.absolute()
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        shutil.copytree(DEMO, "demo")
        made = Path(place) / "recorded"
        record({name: site_of(name) for name in BACKENDS}, made)
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(made, output)
    print(f"written: {sum(path.stat().st_size for path in output.rglob('*.*'))} bytes in {output.name}")


def site_of(name: str) -> Site:
    """Return a site on the CPU whose paths are relative: they are written into the files."""
    device = card_of(name).device("cpu")
    assert device is not None
    training = {"model.name": "demo/model", "data.train": "demo/data/train.jsonl"}
    return Site(get_backend(name, "cpu"), device, SIZES["cpu"], Path(name), training)


if __name__ == "__main__":
    main()
