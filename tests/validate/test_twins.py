"""The five tiers' twins meet every criterion on both backends, and each criterion is seen to fail when broken.

The faults are real ones, under the same run: an engine that trains wrongly, leaks, answers NaN or holds plain weights.
"""

import math
import mmap
import shutil
from dataclasses import replace

import numpy as np
import pytest

from dualtune.doctor.validate.tiers import TIERS
from dualtune.engine.backend import StepOutput
from dualtune.train.hooks import Hook

BOTH = pytest.mark.parametrize("name", ["torch", pytest.param("mlx", marks=pytest.mark.long)])


def failed(result) -> set[str]:
    return {check.name for check in result.checks if check.level == "fail"}


def measured(result, name: str) -> float:
    return next(check.figures["measured"] for check in result.checks if check.name == name)


# Tiers whose criteria another one has too, or which a run with a fault passes below, but for what finds its fault.
HELD_TOO = {("convergence", "mlx"), ("memory", "mlx"), ("extended", "mlx"), ("full", "mlx"), ("extended", "torch")}
ALL = [(tier, name) for tier in TIERS for name in ("torch", "mlx")]


@pytest.mark.tiers_cpu
@pytest.mark.parametrize(
    ("tier", "name"), [pytest.param(*each, marks=[pytest.mark.long] * (each in HELD_TOO)) for each in ALL]
)
def test_a_tiers_twin_passes(run_twin, tier, name):
    result = run_twin(tier, name)
    assert (failed(result), result.state, result.exit_code) == (set(), "passed", 0)
    assert len(result.checks) == len(TIERS[tier].criteria)
    skipped = {check.name for check in result.checks if check.level == "skipped"}
    assert skipped == ({"variation of tokens/s after step 20"} if tier == "extended" else set())


class Engine:
    """Everything that the engine inside does, but for what a subclass says."""

    def __init__(self, inner):
        self.inner = inner
        self.step = 0

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Frozen(Engine):
    """Computes losses, and trains nothing."""

    def optim_step(self, *, lr, max_grad_norm):
        state = self.inner.adapter_state()
        output = self.inner.optim_step(lr=lr, max_grad_norm=max_grad_norm)
        self.inner.load_adapter_state(state)
        return StepOutput(output.loss, 0.0)


@BOTH
def test_a_frozen_adapter_is_found(run_twin, name):
    result = run_twin("convergence", name, divisor=4, engine=Frozen)
    assert failed(result) == {
        "forward and backward ran", "smallest gradient norm", "adapter tensors unchanged",
        "loss decrease, first 10 to last 10 steps",
    }  # fmt: skip
    assert measured(result, "adapter tensors unchanged") == result.observed.num_tensors > 0
    assert (result.state, result.exit_code) == ("failed", 1)


class OneTensorFrozen(Engine):
    def optim_step(self, *, lr, max_grad_norm):
        state = self.inner.adapter_state()
        output = self.inner.optim_step(lr=lr, max_grad_norm=max_grad_norm)
        name = min(state)
        self.inner.load_adapter_state(self.inner.adapter_state() | {name: state[name]})
        return output


def test_a_single_frozen_tensor_is_found(run_twin):
    result = run_twin("memory", "torch", divisor=5, engine=OneTensorFrozen)
    assert failed(result) == {"adapter tensors unchanged"} and measured(result, "adapter tensors unchanged") == 1


class Sluggish(Engine):
    def optim_step(self, *, lr, max_grad_norm):
        return self.inner.optim_step(lr=lr * 1e-4, max_grad_norm=max_grad_norm)


@BOTH
def test_a_flat_loss_is_found(run_twin, name):
    result = run_twin("convergence", name, divisor=4, engine=Sluggish)
    assert failed(result) == {"loss decrease, first 10 to last 10 steps"}


class Drifting(Engine):
    """From its thirtieth step on it climbs."""

    def optim_step(self, *, lr, max_grad_norm):
        self.step += 1
        return self.inner.optim_step(lr=-lr if self.step > 30 else lr, max_grad_norm=max_grad_norm)


def test_a_loss_that_rises_again_is_found(run_twin):
    assert failed(run_twin("extended", "torch", divisor=10, engine=Drifting)) == {
        "largest rise of the loss between windows"
    }


class OneNaN(Engine):
    def optim_step(self, *, lr, max_grad_norm):
        self.step += 1
        output = self.inner.optim_step(lr=lr, max_grad_norm=max_grad_norm)
        return StepOutput(math.nan, math.nan) if self.step == 3 else output


@BOTH
def test_a_single_nan_is_found(run_twin, name):
    result = run_twin("memory", name, divisor=5, engine=OneNaN)
    assert failed(result) == {"losses that are not finite", "smallest gradient norm"}
    assert measured(result, "losses that are not finite") == 1


class OnlyNaN(Engine):
    def optim_step(self, *, lr, max_grad_norm):
        self.inner.optim_step(lr=lr, max_grad_norm=max_grad_norm)
        return StepOutput(math.nan, math.nan)


def test_a_run_that_its_guards_end_has_failed_and_says_why(run_twin):
    result = run_twin("quick", "torch", engine=OnlyNaN)
    assert {"forward and backward ran", "no error of the device", "steps not taken", "the run"} <= failed(result)
    assert "NonFiniteError" in result.checks[-1].found and result.exit_code == 1


class Dying(Engine):
    def optim_step(self, *, lr, max_grad_norm):
        self.step += 1
        if self.step == 4:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore lines")
        return self.inner.optim_step(lr=lr, max_grad_norm=max_grad_norm)


def test_an_error_of_the_device_is_a_verdict_and_no_traceback(run_twin):
    result = run_twin("quick", "torch", engine=Dying)
    assert {"no error of the device", "steps not taken"} <= failed(result)
    assert result.checks[-1].found.startswith(
        "DeviceFault: the device failed in training (CUDA error: an illegal memory"
    )


@BOTH
def test_a_plain_base_where_4_bits_are_asked_for_is_found(run_twin, name):
    plain = lambda request: replace(request, quantization="none")  # noqa: E731
    result = run_twin("quick", name, change=plain)
    assert failed(result) == {"adapted layers not in 4 bits", "bytes per weight of these layers"}
    assert measured(result, "bytes per weight of these layers") == 4.0


class Hoard(Hook):
    """Keeps three megabytes at every step, which show even in a process as large as that of these tests.

    Mapped, so that they are the system's again when they are let go: the next test counts what the process holds.
    """

    def __init__(self):
        self.kept = []

    def on_step(self, record):
        self.kept.append(mmap.mmap(-1, 3 << 20))
        for page in range(0, 3 << 20, mmap.PAGESIZE):
            self.kept[-1][page] = 1


class MlxHoard(Engine):
    def __init__(self, inner):
        super().__init__(inner)
        self.kept = []

    def optim_step(self, *, lr, max_grad_norm):
        import mlx.core as mx

        self.kept.append(mx.ones(2000))
        mx.eval(self.kept[-1])
        return self.inner.optim_step(lr=lr, max_grad_norm=max_grad_norm)


def test_a_leak_of_the_process_is_found(run_twin):
    found = failed(run_twin("extended", "torch", divisor=5, hooks=[leak := Hoard()]))
    for block in leak.kept:
        block.close()
    assert "memory growth after the first window" in found
    assert found <= {"memory growth after the first window", "peak device memory"}


def test_a_leak_of_the_allocator_is_found(run_twin):
    assert failed(run_twin("extended", "mlx", divisor=2, engine=MlxHoard)) == {"memory growth after the first window"}


class Burst(Hook):
    """Takes 400 MB for a moment, once."""

    def on_step(self, record):
        if record.step == 3:
            np.ones(50_000_000)


class MlxBurst(Engine):
    def optim_step(self, *, lr, max_grad_norm):
        import mlx.core as mx

        mx.eval(mx.ones(10_000_000))
        return self.inner.optim_step(lr=lr, max_grad_norm=max_grad_norm)


def test_a_moment_of_too_much_memory_is_found(run_twin):
    assert failed(run_twin("quick", "torch", hooks=[Burst()])) == {"peak device memory"}


def test_a_moment_of_too_much_memory_of_the_allocator_is_found(run_twin):
    assert failed(run_twin("quick", "mlx", engine=MlxBurst)) == {"peak device memory"}


class Damage(Hook):
    """Does something to the checkpoint of step 10 as soon as it is there."""

    def __init__(self, how):
        self._how, self._run_dir = how, None

    def on_start(self, info):
        self._run_dir = info.run_dir

    def on_step(self, record):
        if record.step == 12:
            self._how(self._run_dir / "checkpoints" / "step-00000010")


def cut(path):
    file = path / "adapter.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("how", [shutil.rmtree, cut], ids=["removed", "cut by a byte"])
def test_a_checkpoint_that_is_missing_or_damaged_is_found(run_twin, how):
    result = run_twin("full", "torch", divisor=4, hooks=[Damage(how)])
    assert failed(result) == {"checkpoints missing or damaged"}
    assert measured(result, "checkpoints missing or damaged") == 1


def test_a_run_that_could_not_be_watched_has_failed(run_twin, monkeypatch):
    from dualtune.doctor.validate.run import Watch

    def on_step(self, record):
        raise ValueError("no numbers")

    monkeypatch.setattr(Watch, "on_step", on_step)
    result = run_twin("quick", "torch")
    assert {"steps not taken", "losses that are not finite", "peak device memory"} <= failed(result)
