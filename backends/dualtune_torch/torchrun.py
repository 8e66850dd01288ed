"""torchrun with two changes: it reports how each worker ended, and it forwards signals to the workers.

torchrun exits with 1 whatever the exit codes of its workers were, which hides whether a run was preempted with its
state saved (75) or crashed. Usage: `python -m dualtune_torch.torchrun <options of torchrun> <worker>`. The exit codes
by rank are written as JSON to the file that DUALTUNE_EXIT_CODES names.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import FrameType

import psutil
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous
from torch.distributed.run import parse_args, run

from dualtune_torch.distributed import listen

VARIABLE = "DUALTUNE_EXIT_CODES"
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PREEMPTED = 75


def main(arguments: list[str]) -> int:
    """Run the workers to their end. Returns 0, or 1 if one of them failed."""
    for number in FORWARDED:
        signal.signal(number, _forward)
    threading.Thread(target=_stop_without_parent, args=(os.getppid(),), daemon=True).start()
    options = parse_args(arguments)
    if options.standalone:
        _stay_on_this_machine(options)
    try:
        run(options)
    except ChildFailedError as error:
        _write({rank: failure.exitcode for rank, failure in error.failures.items()})
        return 1
    first = options.node_rank * int(options.nproc_per_node)
    _write(dict.fromkeys(range(first, first + int(options.nproc_per_node)), 0))
    return 0


def _stay_on_this_machine(options: argparse.Namespace) -> None:
    """Let the workers meet at a port of the loopback address. --standalone listens on every address of the machine."""
    listener = listen("127.0.0.1", 0)
    options.standalone, options.rdzv_backend, options.node_rank = False, "static", 0
    options.master_addr, options.master_port = listener.getsockname()
    # There is no option for this, but the class accepts a listening socket.
    store = partial(dist.TCPStore, master_listen_fd=listener.detach())
    static_tcp_rendezvous.TCPStore = store  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]


def _write(codes: dict[int, int]) -> None:
    if path := os.environ.get(VARIABLE):
        Path(path).write_text(json.dumps(codes), encoding="utf-8")


def _forward(number: int, frame: FrameType | None) -> None:
    """Forward the first signal to the workers. If there are none yet, there is nothing to save: exit.

    Later signals are ignored: depending on its configuration, Slurm signals every process of a step or only the first.
    A second signal would kill a worker that has saved and no longer handles signals.
    """
    for other in FORWARDED:
        signal.signal(other, lambda number, frame: None)
    workers = psutil.Process().children()
    if not workers:
        sys.exit(PREEMPTED)
    for worker in workers:
        try:
            worker.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def _stop_without_parent(parent: int) -> None:
    """Wait until the parent process is gone, then let the run save and end: nobody waits for it any more."""
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
