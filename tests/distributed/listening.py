"""Joins the world and tells on which addresses this process and its parent listen."""

import json
import os
import sys
from pathlib import Path

import psutil
import torch.distributed

from dualtune.engine.backend import get_backend


def main(out: str) -> None:
    world = get_backend("torch", "cpu").world()
    world.gather(b"x")
    found = {
        connection.laddr.ip
        for pid in (os.getpid(), os.getppid())
        for connection in psutil.Process(pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    (Path(out) / f"{world.rank}.json").write_text(json.dumps(sorted(found)))
    world.gather(b"y")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
