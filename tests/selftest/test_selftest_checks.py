"""What each check says of a device that is as it should be, and of one that was broken on purpose."""

import os
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from dualtune.doctor.selftest import correctness, cost
from dualtune.doctor.selftest.case import SIZES, ask_for, judged
from dualtune.doctor.selftest.correctness import SWITCH, KernelCase, compare_kernels, kernel_checks, resume_and_compare
from dualtune.doctor.selftest.cost import multiply
from dualtune.doctor.selftest.run import checks_for
from dualtune.engine.backend import OptimizerState
from dualtune.engine.card import card_of
from dualtune.engine.machines import named
from dualtune.engine.memory.estimate import estimate
from dualtune.engine.memory.shapes import decoder_of
from dualtune.train import run as train_run

# --- kernels ---------------------------------------------------------------------------------------------------------

ALL_PLAIN_CODE = KernelCase("lora", "float32", ("lora", "loss"), dropout=0.1)  # fused without a compiler


def test_fused_pieces_pass_and_say_what_was_used(site_of):
    found = compare_kernels(ALL_PLAIN_CODE, site_of("torch"))
    assert (found.level, found.figures["kernels"]) == ("ok", "fused: lora, loss")
    assert 0 < found.figures["gradient"] < found.limits["gradient"]


def test_a_wrong_scale_in_a_backward_pass_fails(site_of, monkeypatch):
    """The engine's own trial runs forward only, so nothing but the gradient can show it."""
    site = site_of("torch")
    from dualtune_torch.kernels.lora import _GroupedLoRA

    right = _GroupedLoRA.backward

    def wrong(ctx, *gradients):
        return right(ctx, *(1.01 * each for each in gradients))

    monkeypatch.setattr(_GroupedLoRA, "backward", staticmethod(wrong))
    found = compare_kernels(ALL_PLAIN_CODE, site)
    assert found.level == "fail" and found.figures["gradient"] > 1e-3 > found.figures["loss"]


def test_a_wrong_forward_pass_is_refused_by_the_engine_and_fails(site_of, monkeypatch):
    site = site_of("torch")
    from dualtune_torch.kernels import trial

    monkeypatch.setattr(trial, "ROUNDING", dict.fromkeys(trial.ROUNDING, -1.0))
    found = compare_kernels(KernelCase("loss", "float32", ("loss",), kernels="fused"), site)
    assert found.level == "fail" and "loss plain: computes different logits" in found.found


def test_a_piece_that_stays_plain_is_skipped_with_its_reason(site_of, monkeypatch, wording):
    site = site_of("torch")
    from dualtune_torch.kernels import compiled

    monkeypatch.setattr(compiled, "why_not", lambda device: "no C++ compiler")
    found = compare_kernels(KernelCase("norms", "float32", ("norms",), kernels="fused"), site)
    assert found.level == "skipped"
    wording(found.found)


def test_fused_pieces_pass_on_mlx(site_of):
    found = compare_kernels(ALL_PLAIN_CODE, site_of("mlx"))
    assert (found.level, found.figures["kernels"]) == ("ok", "fused: lora, loss")


@pytest.mark.parametrize("name", ["torch", "mlx"])
def test_each_piece_of_a_card_is_one_of_the_engine(name, site_of):
    """The list in the card is what the choice of kernels looks at: an unknown piece would be compared with itself."""
    site = site_of(name)
    for piece in site.card.pieces:
        if piece in ("norms", "mlp", "rotary", "compiled step"):
            continue  # the command compiles them
        found = compare_kernels(KernelCase(piece, "float32", (piece,), kernels="fused"), site)
        assert found.figures["kernels"] == f"fused: {piece}"


def test_sixteen_bits_are_judged_by_what_the_plain_code_rounds(site_of):
    found = compare_kernels(replace(ALL_PLAIN_CODE, dtype="bfloat16"), site_of("torch"))
    assert found.level == "ok"
    assert found.limits["gradient"] == pytest.approx(2 * found.figures["plain gradient"])


def test_a_piece_that_is_not_in_use_is_not_compared_with_itself(site_of, wording):
    found = compare_kernels(
        KernelCase("nf4_dequant", "float32", ("lora", "nf4_dequant"), piece="nf4_dequant"), site_of("torch")
    )
    assert found.level == "skipped"
    wording(found.found)


def test_the_kernels_of_a_gpu_are_asked_for_and_skipped_where_there_is_none(site_of, monkeypatch, wording):
    monkeypatch.delenv(SWITCH, raising=False)
    case = KernelCase("lora_back_g", "float32", ("lora", "lora_back_g"), piece="lora_back_g", is_small=True)
    found = compare_kernels(case, site_of("torch"))
    assert found.level == "skipped"
    wording(found.found)
    assert SWITCH not in os.environ


def test_the_card_names_the_kernels_of_a_gpu():
    select = pytest.importorskip("dualtune_torch.kernels.gpu.select")
    assert [*select.KERNELS] == [*card_of("torch").device("cuda").pieces]
    choose = pytest.importorskip("dualtune_torch.kernels.choose")
    assert {"lora", "attention", "loss", *choose.BLOCKS} == {*card_of("torch").pieces}


def test_every_device_has_its_checks():
    """Also those of devices that are not here: nothing of them is loaded."""
    names = {
        kind: {check.name for check in checks_for(card_of(backend), card_of(backend).device(kind))}
        for backend, kind in (("torch", "cuda"), ("mlx", "metal"), ("torch", "cpu"))
    }
    assert {"kernels/graph", "kernels/norms bfloat16", "kernels/nf4", "recorded/bfloat16"} <= names["cuda"]
    assert {"kernels/compiled step bfloat16", "kernels/affine4"} <= names["metal"]
    assert not {"kernels/graph", "kernels/nf4"} & names["metal"]
    assert {"kernels/lora_back_g", "resume/deterministic"} <= names["cuda"]
    assert "recorded/bfloat16" not in names["cpu"] and "resume/usual" in names["cpu"]
    assert not kernel_checks(card_of("numpy"), card_of("numpy").device("cpu"))


def test_what_is_not_a_number_is_not_within_a_tolerance():
    rows = [judged("numbers/x", "", {"x": x}, {"x": 1.0}) for x in (1.0, 1.1, float("nan"))]
    assert [row.level for row in rows] == ["ok", "fail", "fail"]


# --- waits -----------------------------------------------------------------------------------------------------------


class Waiting:
    """A backend that says where the host waited."""

    def __init__(self, backend, places):
        self._backend, self._places = backend, places

    @contextmanager
    def counted_waits(self):
        found = []
        yield found
        found += self._places

    def __getattr__(self, name):
        return getattr(self._backend, name)


def test_waits_fail_with_their_places(site_of, monkeypatch, wording):
    site = site_of("torch")
    monkeypatch.setattr(type(site), "card", replace(site.card, pieces=("lora",)))  # nothing is compiled
    none = cost.count("none", replace(site, backend=Waiting(site.backend, [])))
    some = cost.count("none", replace(site, backend=Waiting(site.backend, ["engine.py:206"] * 3)))
    assert (none.level, some.level) == ("ok", "fail")
    assert some.figures == {"waits": 3}
    wording(some.found)


def test_waits_are_skipped_where_nobody_counts_them(site_of, wording):
    wording(cost.count("none", site_of("torch")).found)


def test_waits_are_skipped_for_a_backend_that_does_not_say(site_of):
    found = cost.count("none", site_of("numpy"))
    assert (found.level, "does not say" in found.found) == ("skipped", True)


def test_torch_reports_waits_as_warnings_and_the_mode_is_put_back(monkeypatch):
    """Without a GPU the mode is a stand-in: it remembers what it is set to, and work inside the block warns."""
    torch = pytest.importorskip("torch")
    import warnings

    from dualtune_torch.host.transfers import MESSAGE, counted_waits

    modes = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with counted_waits() as places:
        assert modes[-1] == "warn"
        warnings.warn(MESSAGE, stacklevel=1)
        warnings.warn(MESSAGE, stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert modes[-1] == 0
    assert [place.partition(":")[0] for place in places] == ["test_selftest_checks.py"] * 2


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "level"), [(1.0, "ok"), (1.3, "fail"), (0.7, "fail")])
def test_an_estimate_that_is_off_fails(site_of, share, level):
    """The tensors are given: those of other tests would count, too. `test_selftest_command.py` has a real process."""
    site = site_of("torch")
    (shape,) = site.sizes.memory
    arrays = cost._arrays(estimate(decoder_of(dict(shape.config)), ask_for(site, shape)))

    class Profiled:
        def __getattr__(self, name):
            return getattr(site.backend, name)

        def profile(self, step, directory):
            return SimpleNamespace(peak_bytes=int(share * arrays))

    assert cost.measure_memory(shape, replace(site, backend=Profiled())).level == level


class Counting:
    """A backend whose allocator counts, as on a GPU."""

    def __init__(self, backend, peak, cached):
        self._backend, self._peak, self._cached = backend, peak, cached

    def memory(self):
        return replace(
            self._backend.memory(), used_bytes=0, peak_bytes=self._peak, total_bytes=1 << 50, cached_bytes=self._cached
        )

    def __getattr__(self, name):
        return getattr(self._backend, name)


@pytest.mark.parametrize(("peak", "kept", "level"), [(1.0, 1.1, "ok"), (1.3, 1.3, "fail"), (1.0, 1.5, "fail")])
def test_an_allocator_is_judged_by_its_peak_and_by_what_it_keeps(site_of, monkeypatch, peak, kept, level):
    site = site_of("torch")
    (shape,) = site.sizes.memory
    site = replace(site, device=replace(site.device, kind="cuda"))
    expected = estimate(decoder_of(dict(shape.config)), ask_for(site, shape))
    arrays, reserve = cost._arrays(expected), expected[cost.RESERVE]
    backend = Counting(site.backend, int(peak * arrays + (reserve if peak > 1 else 0)), int(kept * arrays + reserve))
    assert cost.measure_memory(shape, replace(site, backend=backend)).level == level


def test_what_does_not_fit_is_skipped(site_of):
    site = site_of("torch")
    (shape,) = site.sizes.memory
    device = replace(site.backend.devices()[0], total_bytes=1 << 20)
    small = Counting(site.backend, 0, 0)
    small.devices = lambda: [device]
    found = cost.measure_memory(shape, replace(site, backend=small))
    assert found.level == "skipped" and "the device has 1.0 MiB" in found.found


# --- device and speed ------------------------------------------------------------------------------------------------


def test_device_and_speed_are_measured(site_of, monkeypatch):
    site = site_of("torch")
    found = multiply(site)
    assert found.level == "ok" and found.figures["flops_per_s"]["float32"] > 0
    found = cost.measure_speed(site)
    assert found.level == "ok" and found.figures["tokens_per_s"] > 0
    assert found.figures["predicted_tokens_per_s"] is None and found.found.endswith("no prediction")
    monkeypatch.setattr(cost, "predicted_tokens_per_s", lambda site, shape: 10**9)
    monkeypatch.setattr(cost, "train_on", lambda *given: 1.0)
    assert cost.measure_speed(site).found.endswith("of the predicted 1,000,000,000")
    monkeypatch.setattr(cost, "train_on", lambda *given: float("nan"))
    assert cost.measure_speed(site).level == "fail"


def test_the_speed_of_a_gpu_is_predicted_if_its_limits_are_known(site_of, monkeypatch):
    site = site_of("torch")
    shape, site = SIZES["cuda"].speed, replace(site, device=replace(site.device, kind="cuda", auto_dtype="bfloat16"))
    monkeypatch.setattr(cost, "detect", lambda: named("h100-80"))
    most = 989e12 / (4 * 1.03e9)  # TinyLlama's products alone
    assert 0.2 * most < cost.predicted_tokens_per_s(site, shape) < 0.8 * most
    monkeypatch.setattr(cost, "detect", lambda: named("rtx-4000-ada-20"))
    assert cost.predicted_tokens_per_s(site, shape) is None


# --- resume ----------------------------------------------------------------------------------------------------------


def test_a_resumed_run_is_bitwise(site_of):
    found = resume_and_compare(False, site_of("numpy"))
    assert found.level == "ok" and found.figures["bitwise"] and found.figures["straight_runs_bitwise"]


def _without_moments(right, engine, saved):
    empty = {slot: {n: np.zeros_like(x) for n, x in each.items()} for slot, each in saved.optimizer.slots.items()}
    right(engine, replace(saved, optimizer=OptimizerState(saved.optimizer.step, empty)))


def test_a_changed_optimizer_state_fails(site_of, monkeypatch):
    site = site_of("numpy")
    monkeypatch.setattr(train_run, "restore", partial(_without_moments, train_run.restore))
    found = resume_and_compare(False, site)
    assert found.level == "fail" and not found.figures["bitwise"]
    assert "two straight runs agree to the bit" in found.found


@pytest.mark.parametrize(("kind", "level"), [("cpu", "fail"), ("cuda", "ok")])
def test_noise_is_allowed_on_a_gpu_alone_and_said(site_of, monkeypatch, kind, level):
    site = site_of("numpy")
    site = replace(site, device=replace(site.device, kind=kind, auto_dtype="bfloat16"))
    noise = np.random.default_rng(0)
    right = correctness.short_run

    def noisy(*args, **kwargs):
        found = right(*args, **kwargs)
        return replace(found, losses=[loss + noise.normal(0, 1e-4) for loss in found.losses])

    monkeypatch.setattr(correctness, "short_run", noisy)
    found = resume_and_compare(False, site)
    assert found.level == level
    assert "not bitwise" in found.found and "two straight runs differ as well" in found.found
