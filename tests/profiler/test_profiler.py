"""The profiler on planted numbers: snapshots, peaks, phases, spikes, leaks, and the two texts that users parse."""

import mmap

import numpy as np
import pytest

from dualtune.base.errors import FormatError
from dualtune.engine.backend import MemoryStats
from dualtune.train.profiler.analysis import find_leak
from dualtune.train.profiler.profiler import MemoryProfiler
from dualtune.train.profiler.snapshot import MB, TIMELINE_HEADER, Snapshot, read_timeline, timeline_row

GIB = 1 << 30


def profiled(*recorded, seconds=1.0, total=16 * GIB):
    """A profiler with (step, phase, MB) at regular times."""
    profiler = MemoryProfiler()
    profiler.snapshots = [
        Snapshot(step, phase, int(mb * MB), total, 1000 + i * seconds) for i, (step, phase, mb) in enumerate(recorded)
    ]
    return profiler


EXAMPLE = [(0, "Warmup", 1024), (1, "Full", 3072), (2, "Predict", 2048), (3, "Full", 2560)]


def series(megabytes):
    return profiled(*((step, "Full", mb) for step, mb in enumerate(megabytes))).snapshots


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_a_snapshot_in_other_units():
    snapshot = Snapshot(3, "Full", 2 * GIB, 16 * GIB, 0.0)
    assert (snapshot.used_mb, snapshot.utilization_percent) == (2048, 12.5)


def test_utilization_of_an_unknown_total_is_zero():
    assert Snapshot(0, "Full", GIB, 0, 0.0).utilization_percent == 0


def test_record_step_reads_the_source():
    numbers = iter([MemoryStats(MB, 5 * MB, GIB), MemoryStats(2 * MB, 5 * MB, GIB)])
    profiler = MemoryProfiler(lambda: next(numbers))
    profiler.start()
    assert profiler.record_step(0, "Warmup") == profiler.snapshots[0]
    profiler.record_step(1, "Full")
    found = [(s.step, s.phase, s.used_bytes, s.total_bytes) for s in profiler.snapshots]
    assert found == [(0, "Warmup", MB, GIB), (1, "Full", 2 * MB, GIB)]
    assert 0 <= profiler.snapshots[1].timestamp - profiler.snapshots[0].timestamp < 3600
    profiler.start()
    assert profiler.snapshots == []


def test_without_a_source_of_numbers_nothing_is_recorded(wording):
    profiler = MemoryProfiler(lambda: None)
    assert profiler.record_step(0, "Full") is None
    wording(profiler.generate_report())


def test_the_memory_of_this_process_is_the_default():
    profiler = MemoryProfiler()
    before = profiler.record_step(0, "Full")
    # Not from the allocator: another test may have told it to keep freed blocks, and they are in memory already.
    with mmap.mmap(-1, 64 * MB) as ballast:
        for page in range(0, 64 * MB, mmap.PAGESIZE):
            ballast[page] = 1
        after = profiler.record_step(1, "Full")
    assert 50 * MB < after.used_bytes - before.used_bytes < 100 * MB
    assert before.total_bytes > before.used_bytes


def test_the_peak_with_its_step_and_phase():
    peak = profiled(*EXAMPLE).peak
    assert (peak.bytes, peak.mb, peak.gb, peak.step, peak.phase) == (3 * GIB, 3072, 3, 1, "Full")
    assert MemoryProfiler().peak is None


def test_a_counter_of_the_peak_finds_it_between_snapshots():
    used = [Snapshot(1, "data", 100, GIB, 0.0, 100), Snapshot(1, "micro-batch", 110, GIB, 0.0, 900),
            Snapshot(1, "optimizer", 120, GIB, 0.0, 900)]  # fmt: skip
    profiler = MemoryProfiler()
    profiler.snapshots = used
    assert (profiler.peak.bytes, profiler.peak.phase) == (900, "micro-batch")


def test_mean_maximum_and_minimum_by_phase():
    phases = profiled(*EXAMPLE).phases()
    assert [*phases] == ["Warmup", "Full", "Predict"]
    full = phases["Full"]
    assert (full.num_snapshots, full.mean_bytes, full.max_bytes, full.min_bytes) == (
        2, 2816 * MB, 3072 * MB, 2560 * MB,
    )  # fmt: skip


def test_no_phases_without_snapshots():
    assert MemoryProfiler().phases() == {}


def test_a_spike_is_an_increase_above_the_threshold():
    profiler = profiled((0, "Full", 1000), (1, "Full", 1500), (2, "Predict", 2001), (3, "Full", 1000))
    assert profiler.spikes(500) == [(2, 501.0, "Predict")]
    assert [spike.step for spike in profiler.spikes()] == [1, 2]


# --- texts -----------------------------------------------------------------------------------------------------------


def test_the_report(wording):
    wording(profiled(*EXAMPLE).generate_report())


def test_the_report_shows_ten_spikes(wording):
    report = profiled(*((step, "Full", 200 * step) for step in range(14))).generate_report()
    assert report.count("+200.0 MB") == 10
    wording(report)


def test_the_report_of_nothing(wording):
    wording(MemoryProfiler().generate_report())


def test_the_csv():
    assert profiled(*EXAMPLE[:2]).export_csv() == (
        "step,phase,used_mb,total_mb,utilization_percent\n0,Warmup,1024.00,16384.00,6.25\n1,Full,3072.00,16384.00,18.75\n"
    )


def test_the_csv_of_nothing_is_its_header():
    assert MemoryProfiler().export_csv() == "step,phase,used_mb,total_mb,utilization_percent\n"


def test_a_phase_with_a_comma_is_quoted():
    assert '0,"a, b",' in profiled((0, "a, b", 1)).export_csv()


# --- leaks -----------------------------------------------------------------------------------------------------------


def noise(seed, steps=500):
    return np.random.default_rng(seed).normal(0, 5, steps)


@pytest.mark.parametrize("seed", range(5))
def test_a_planted_leak_is_found_with_its_slope(seed):
    leak = find_leak(series(1000 + noise(seed) + 0.2 * np.arange(500)))
    assert leak.found
    assert abs(leak.slope / MB - 0.2) < leak.bound / MB < 0.15


def test_noise_is_no_leak():
    found = [find_leak(series(1000 + noise(seed))).found for seed in range(100)]
    assert not any(found)


def test_a_random_walk_is_a_leak_in_one_case_of_a_thousand():
    """The increases are independent with mean zero: what the bound is made for."""
    walks = 1000 + 50 * np.random.default_rng(0).normal(size=(400, 500)).cumsum(axis=1)
    floor = walks.min() - 100  # the test is about the bound, which a constant does not change
    assert sum(find_leak(series(walk - floor)).found for walk in walks) <= 3


def test_a_warm_up_does_not_hide_a_leak():
    """500 MB in the first tenth of the run, which would be a large spread among the increases."""
    steps = np.arange(500)
    assert find_leak(series(1000 + 0.2 * steps + 10.0 * np.minimum(steps, 50))).found


@pytest.mark.parametrize("at", [150, 300, 450])
def test_one_jump_is_no_leak(at):
    assert not find_leak(series(np.where(np.arange(500) < at, 1000.0, 1500.0))).found


def test_a_warm_up_is_no_leak():
    steps = np.arange(500)
    assert not find_leak(series(1000 + 400 * (1 - np.exp(-steps / 40)))).found


def test_a_growth_below_one_percent_is_no_leak():
    assert not find_leak(series(1000 + 0.015 * np.arange(500))).found
    assert find_leak(series(1000 + 0.05 * np.arange(500))).found


def test_the_floor_of_a_step_counts_not_its_phases():
    """Phases of unequal height, and one that occurs rarely."""
    rows = [(s, phase, mb) for s in range(500) for phase, mb in (("data", 500), ("micro-batch", 500 + 3 * (s % 90)))]
    assert not find_leak(profiled(*rows).snapshots).found


def test_short_series_are_not_judged():
    assert find_leak(series(np.arange(49) * 100.0)) is None
    assert find_leak(series(np.arange(1, 51) * 100.0)).found


# --- the file of a run -----------------------------------------------------------------------------------------------


def test_a_timeline_is_read_as_it_was_written(tmp_path):
    rows = [Snapshot(0, "start", 5, 9, 1.5), Snapshot(1, "micro-batch", 6, 9, 2.25, 7, 0, 8, 3)]
    path = tmp_path / "memory.csv"
    path.write_text(",".join(TIMELINE_HEADER) + "\n" + "".join(map(timeline_row, rows)))
    assert read_timeline(path) == rows


def test_damaged_rows_of_a_timeline_are_left_out(tmp_path):
    path, row = tmp_path / "memory.csv", timeline_row(Snapshot(1, "data", 6, 9, 2.0))
    bad = ["1,data,x,,,,,9,2.000\n", "1,data\n", "\n", "1,data,,,,,,9,2.000\n"]
    path.write_text(",".join(TIMELINE_HEADER) + "\n" + row + "".join(bad) + row + "2,optimizer,12")
    assert read_timeline(path) == 2 * [Snapshot(1, "data", 6, 9, 2.0)]


@pytest.mark.parametrize("text", [None, "", "a,b\n1,2\n"])
def test_a_file_that_is_no_timeline_is_refused(tmp_path, text):
    path = tmp_path / "memory.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(FormatError, match=r"memory\.csv"):
        read_timeline(path)
