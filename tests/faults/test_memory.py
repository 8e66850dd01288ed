"""Memory that runs out, in real processes: recovered from where that is possible, else exit 8 and nothing lost."""

import pytest

from dualtune.base.errors import OutOfMemory

BOTH = pytest.mark.parametrize("box", ["numpy", pytest.param("cpu", marks=pytest.mark.long)], indirect=True)
ERROR = {
    "numpy": "error = MemoryError('Unable to allocate 8.00 EiB')\n",
    "cpu": 'error = RuntimeError("DefaultCPUAllocator: can\'t allocate memory: you tried to allocate 8 EiB")\n',
}


def raises(box, call):
    return ERROR[box.platform] + f"enter({box.forward!r}, {call}, throw(error))"


@pytest.mark.fault(
    row=21,
    fault="out of memory in a step",
    injection="the allocator's error at the fourth micro-batch",
    expected="the step is repeated with smaller micro-batches; losses as without it, to 1e-6; exit 0",
)
@BOTH
def test_a_step_is_repeated_with_smaller_micro_batches(box):
    said = box.train(0, inject=raises(box, 4)).stdout
    (event,) = box.events("out_of_memory")
    assert event["tokens_after"] < event["tokens_before"] == 64 and event["message"] in " ".join(said.split())
    found = box.losses()
    box.straight()
    box.settings["run.dir"] = box.home / "ref"
    assert [step for step, _ in found] == [step for step, _ in box.losses()] == [*range(1, 10)]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in box.losses()], rel=1e-6)


@pytest.mark.fault(
    row=21,
    fault="out of memory at the smallest micro-batch",
    injection="the allocator's error at every micro-batch, from the start",
    expected="exit 8: what takes the memory, and three settings that take less; the same command resumes",
)
@BOTH
def test_at_the_smallest_micro_batch_the_run_ends_with_8(box):
    stderr = box.train(OutOfMemory.exit_code, inject=raises(box, 0)).stderr
    assert stderr.startswith("Error: out of memory: ") and stderr.count("--set") == 3
    assert box.checkpoints == ["step-00000000"]
    box.resume()
    assert [step for step, _ in box.losses()] == [*range(1, 10)]
