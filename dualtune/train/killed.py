"""What the files of a run say about a process before that was killed without a word."""

from __future__ import annotations

from dualtune.errors import FormatError
from dualtune.profiler.snapshot import each_snapshot
from dualtune.text.show import in_bytes
from dualtune.train.memory import RunMemory
from dualtune.train.state.run_dir import TIMELINE, RunDir

CLOSE = 0.9  # of the memory that a run may use


def suspected(run_dir: RunDir, memory: RunMemory) -> list[str]:
    """Return a note if the process before was killed, and came close to the end of its memory before.

    Its last rows may be missing: a killed process could not write them.
    """
    if run_dir.lock is None or not run_dir.lock.holder_was_killed:
        return []
    try:
        rows = each_snapshot(run_dir.path / TIMELINE)
        most = max((max(row.used_bytes, row.peak_bytes or 0, row.process_bytes or 0) for row in rows), default=0)
    except FormatError:
        return []
    if most < CLOSE * memory.budget.bytes:
        return []
    return [
        f"the process before was killed after it had used {in_bytes(most)}, and {in_bytes(memory.budget.bytes)} are "
        "available: memory is the likely cause. --max-restarts 3 resumes such a run by itself, with smaller "
        "micro-batches; or lower train.micro_batch_tokens"
    ]
