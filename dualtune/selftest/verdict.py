"""The verdict in words: what works, what failed, what stayed plain and why, what is slow, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dualtune.selftest.process import CheckResult

SLOW = 0.5  # of the predicted speed
# By the group of a check that failed: what it means for a user.
NEXT = {
    "device": "dualtune check-gpu says what is missing",
    "numbers": "this device does not compute float32 as float32: do not compare its float32 runs with other machines",
    "kernels": "train with model.kernels=reference until the kernel is mended",
    "waits": "training is right, but the device idles while the host waits: expect less speed",
    "memory": "keep more memory free than the estimate says: lower train.micro_batch_tokens first",
    "resume": "do not rely on a resumed run being the one that was stopped",
    "recorded": "do not compare losses of this machine with those of others",
    "speed": "look at the check's own words",
}
SEND = "attach the archive to an issue, by the form for self-tests"


def verdict(results: Sequence[CheckResult]) -> list[str]:
    """Return the lines of the verdict, each with its label."""
    return [f"{label:<11} {words}" for label, words in _lines(results)]


def _lines(results: Sequence[CheckResult]) -> Iterator[tuple[str, str]]:
    failed = [result for result in results if result.outcome == "failed"]
    passed = [result for result in results if result.outcome == "passed"]
    yield "works", f"{len(passed)} of {len(passed) + len(failed)} checks that could be made passed: {_groups(passed)}"
    for result in failed:
        yield "failed", f"{result.name}: {result.words}"
    for result in results:
        if result.outcome == "skipped":
            is_kernel = result.name.startswith("kernels/")
            yield "plain" if is_kernel else "skipped", f"{result.name}: {result.words}"
    for result in results:
        if not result.figures.get("bitwise", True) and result.outcome == "passed":
            yield "differs", result.words
    yield from _speed(results)
    for group in dict.fromkeys(result.name.partition("/")[0] for result in failed):
        yield "next", NEXT[group]
    yield "next", SEND if failed else f"dualtune validate --tier quick, then train. And {SEND}"


def _groups(results: Sequence[CheckResult]) -> str:
    return ", ".join(dict.fromkeys(result.name.partition("/")[0] for result in results)) or "none"


def _speed(results: Sequence[CheckResult]) -> Iterator[tuple[str, str]]:
    for result in results:
        found, predicted = (result.figures.get(name) for name in ("tokens_per_s", "predicted_tokens_per_s"))
        if found and predicted and found < SLOW * predicted:
            yield "slow", f"{result.words}. dualtune bench shows where the time goes"
        elif found:
            yield "speed", result.words
