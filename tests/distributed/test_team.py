"""What the loop says to the other processes, in a world of threads; real processes are in the files beside this one."""

import math
import threading
import time

import numpy as np
import pytest

from dualtune.base import interrupt
from dualtune.base.errors import DataError, EnvironmentFault, Preempted
from dualtune.train import team as team_module
from dualtune.train.rl.rewards import JudgedAnswers
from dualtune.train.team import PeerFailed, Team, Watchdog


class Meetings:
    """Where threads exchange data. One that ends leaves the others nobody to wait for, where processes would hang."""

    def __init__(self, size):
        self.size, self._changed = size, threading.Condition()
        self._number, self._brought, self._found, self._someone_left = 0, {}, [], False

    def meet(self, rank, data):
        with self._changed:
            number, self._brought[rank] = self._number, data
            if len(self._brought) == self.size:
                self._found = [self._brought[each] for each in range(self.size)]
                self._number, self._brought = number + 1, {}
                self._changed.notify_all()
            while self._number == number:
                assert not self._someone_left, f"process {rank} waits for one that has ended"
                self._changed.wait()
            return self._found

    def leave(self):
        with self._changed:
            self._someone_left = True
            self._changed.notify_all()


class ThreadWorld:
    """Processes that are threads."""

    def __init__(self, rank, meetings):
        self.rank, self.size, self._meetings = rank, meetings.size, meetings

    def gather(self, data):
        found = self._meetings.meet(self.rank, data)
        assert len({len(part) for part in found}) == 1
        return found

    def broadcast(self, data):
        return self.gather(data)[0]


def in_world(size, work):
    """[what work(team) returned or raised in each of `size` processes]."""
    meetings, results = Meetings(size), [None] * size

    def run(rank):
        try:
            results[rank] = work(Team(ThreadWorld(rank, meetings)))
        except Exception as error:  # noqa: BLE001  it is the result
            results[rank] = error
        meetings.leave()

    threads = [threading.Thread(target=run, args=[rank]) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_one_that_waits_for_one_that_has_ended_fails_at_once():
    waits, ends = in_world(2, lambda team: team.rank or team.agree(True))
    assert isinstance(waits, AssertionError) and ends == 1


def test_a_wish_of_one_is_the_decision_of_all():
    assert in_world(3, lambda team: team.agree(team.rank == 2)) == [True] * 3
    assert in_world(3, lambda team: team.agree(False)) == [False] * 3


def test_totals_are_the_same_bits_everywhere():
    numbers = [0.1, 1e17, -1e17]
    totals = in_world(3, lambda team: team.total(numbers[team.rank], team.rank))
    assert totals == [(0.1 + 1e17 - 1e17, 3.0)] * 3


def test_any_number_of_numbers_is_added_up():
    totals = in_world(3, lambda team: team.totals(np.arange(5) + team.rank).tolist())
    assert totals == [[3.0, 6.0, 9.0, 12.0, 15.0]] * 3


def test_all_have_the_bytes_of_each_of_whatever_length():
    for lengths in ([3, 0, 70], [0, 0, 0]):
        assert (
            in_world(3, lambda team, n=lengths: team.gather(b"\0" * n[team.rank])) == [[b"\0" * n for n in lengths]] * 3
        )
    assert in_world(3, lambda team: team.most(team.rank)) == [2, 2, 2]


def test_records_of_all_are_the_same_in_each():
    """Also numbers that JSON has no word for, and arrays of several dimensions."""

    def work(team):
        values_NR = np.array([[0.1, math.nan]]) * (team.rank + 1)
        judged = JudgedAnswers(values_NR, np.array([team.rank == 1]), np.ones(2), (f"of {team.rank}",))
        found = team.collect([judged], JudgedAnswers.read)
        return JudgedAnswers.joined(found, [1, 0])

    for found in in_world(2, work):
        np.testing.assert_array_equal(found.values_NR, [[0.2, math.nan], [0.1, math.nan]])
        np.testing.assert_array_equal(found.totals_N, [math.nan, 0.1])
        assert found.failures == ("of 0", "of 1")


def works(team, seconds, ends=lambda: None):
    """Work for itself for so long, and then end so."""
    with team.apart():
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            interrupt.poll()
            time.sleep(0.005)
        ends()
    return "done"


def test_processes_that_work_apart_leave_together(monkeypatch):
    """Each says that it still works, and those that are done hear of it, of a failure and of a stop."""
    monkeypatch.setattr(team_module, "_NEWS_S", 0.02)
    assert in_world(3, lambda team: works(team, [0.0, 0.3, 0.1][team.rank])) == ["done"] * 3

    def fail():
        raise DataError("row 7")

    def failing(team):
        with team.together():
            return works(team, [0.0, 0.1][team.rank], fail if team.rank else lambda: None)

    told, error = in_world(2, failing)
    assert isinstance(told, PeerFailed) and told.exit_code == DataError.exit_code and isinstance(error, DataError)

    asked = threading.local()
    monkeypatch.setattr(interrupt, "requested", lambda: getattr(asked, "stop", False))

    def stopped(team):
        asked.stop = team.rank == 1
        return works(team, [0.0, 30.0][team.rank])

    assert [type(error) for error in in_world(2, stopped)] == [Preempted, Preempted]


@pytest.mark.parametrize("size", [0, 1, 5000])
def test_all_have_the_bytes_of_the_first(size):
    sent = bytes(range(256)) * 20
    assert in_world(3, lambda team: team.broadcast(sent[:size] if team.is_first else b"other")) == [sent[:size]] * 3


def test_the_first_works_before_the_others():
    order = []

    def work(team):
        with team.in_turn():
            order.append(team.rank)

    in_world(3, work)
    assert order[0] == 0
    assert sorted(order) == [0, 1, 2]


@pytest.mark.parametrize("failing", [0, 2])
def test_the_failure_of_one_ends_all_with_its_reason_and_exit_code(failing):
    def work(team):
        with team.together():
            if team.rank == failing:
                raise DataError("row 7 is broken")
            team.total(1.0)  # whatever the others wait for next

    results = in_world(3, work)
    assert isinstance(results.pop(failing), DataError)
    for error in results:
        assert isinstance(error, PeerFailed)
        assert str(error) == f"process {failing} of 3 has failed: DataError: row 7 is broken"
        assert error.exit_code == DataError.exit_code


def test_the_reason_of_a_failure_is_without_secrets():
    def work(team):
        with team.together():
            if team.rank:
                raise EnvironmentFault("the hub refused hf_abcdefghijklmnopqrstuvwxyzABCDEF12")
            team.check()

    assert "hf_abc" not in str(in_world(2, work)[0])


def test_two_that_fail_at_once_each_say_their_own():
    def work(team):
        with team.together():
            raise DataError(f"mine is {team.rank}")

    assert [str(error) for error in in_world(2, work)] == ["mine is 0", "mine is 1"]


def test_a_request_to_stop_reaches_those_that_got_no_signal():
    results = in_world(2, lambda team: team.poll(team.rank == 1))
    assert not interrupt.requested()
    assert [type(error) for error in results] == [Preempted, Preempted]
    assert "another process of the run was asked to stop" in str(results[0])


def test_memory_that_ran_out_in_one_is_known_to_all():
    """As many tokens as in the largest micro-batch that did not fit; a request to stop comes first."""
    assert in_world(3, lambda team: team.poll(False, [0, 300, 200][team.rank])) == [300] * 3
    assert in_world(2, lambda team: team.poll(False)) == [0, 0]
    results = in_world(2, lambda team: team.poll(team.rank == 0, 300))
    assert [type(error) for error in results] == [Preempted, Preempted]


def test_a_failure_while_the_engines_exchange_something_is_not_told():
    def work(team):
        if team.rank == 0:
            return "waits for the sum, not for a note"
        with team.together(), team.in_engine():
            raise MemoryError

    waits, error = in_world(2, work)
    assert isinstance(error, MemoryError) and "sum" in waits


def test_alone_nothing_is_exchanged_and_nothing_watched():
    team = Team(watchdog=Watchdog(0.0, expire=lambda message: pytest.fail(message)))
    with team.together(), team.waiting("anything"):
        assert team.agree(True)
        assert not team.agree(False)
        assert team.total(2.5, 1.0) == (2.5, 1.0)
        assert team.broadcast(b"mine") == b"mine"


def test_a_wait_that_is_too_long_is_ended_and_a_short_one_is_not():
    ended = threading.Event()
    said = []

    def expire(message):
        said.append(message)
        ended.set()

    watchdog = Watchdog(0.2, expire)
    with watchdog.waiting("a short one"):
        pass
    assert not ended.wait(0.5)
    with watchdog.waiting("process 1"):
        assert ended.wait(10)
    assert said == [
        "waited 0.2 s for process 1: it hangs or needs more time. Check its output. "
        "To wait longer: DUALTUNE_WAIT_S=<seconds>"
    ]
