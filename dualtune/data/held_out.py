"""Which rows are held out for evaluation: a function of the seed, the share, and the tokens of the rows."""

from __future__ import annotations

import numpy as np

from dualtune.errors import DataError

FAR = 2.0  # by this factor the held-out share of the tokens may differ from the share that was asked for


def held_out(num_rows: int, share: float, seed: int) -> np.ndarray:
    """bool [num_rows]: a share of the rows, at least one if any: a function of the seed and the number alone."""
    number = min(max(1, round(share * num_rows)), num_rows - 1) if share else 0
    chosen = np.zeros(num_rows, bool)
    chosen[np.random.default_rng([seed, 0]).permutation(num_rows)[:number]] = True
    return chosen


def probe_documents(num_documents: int, number: int, seed: int) -> list[int]:
    """The indices of the documents that are held out of the training data to probe a step with; DataError if too few.

    A function of the seed and the two numbers alone.
    """
    if number and number >= num_documents:
        raise DataError(
            f"{number} training documents are to be held out as probes, and there are {num_documents}. Use more data"
        )
    return sorted(np.random.default_rng([seed, 5]).permutation(num_documents)[:number].tolist())


def held_out_tokens(tokens: np.ndarray, share: float, seed: int) -> tuple[np.ndarray, str]:
    """bool [rows], given the tokens of each row, and a remark where the share cannot be kept.

    It is a share of the rows, as `held_out` chooses them. Only where these hold less than half of that share of the
    tokens, or more than twice as much, rows are chosen by their tokens.
    """
    chosen = held_out(len(tokens), share, seed)
    if not share or _is_near(tokens, chosen, share):
        return chosen, ""
    order = np.random.default_rng([seed, 0]).permutation(len(tokens))
    order = order[tokens[order] > 0]
    if len(order) < 2:
        return np.zeros(len(tokens), bool), (
            f"none: data.eval asks for {share:.0%} of the rows, and there is only one to learn from. "
            "Divide the row, name evaluation data in data.eval, or set it to 0"
        )
    chosen = _by_tokens(tokens, order, share)
    if _is_near(tokens, chosen, share):
        return chosen, ""
    found = f"{_share(tokens, chosen):.0%} of the tokens are held out where data.eval asks for {share:.0%}"
    return chosen, f"{found}: the rows are too few and too uneven for it. Divide the longest rows"


def _by_tokens(tokens: np.ndarray, order: np.ndarray, share: float) -> np.ndarray:
    """Of the rows in this order, each that brings the sum of their tokens nearer to the share; not all, not none."""
    left = share * float(tokens.sum())
    taken: list[int] = []
    for row in order.tolist():
        if tokens[row] < 2 * left:
            taken.append(row)
            left -= float(tokens[row])
    chosen = np.zeros(len(tokens), bool)
    chosen[taken[: len(order) - 1] or order[np.argmin(tokens[order])]] = True
    return chosen


def _share(tokens: np.ndarray, chosen: np.ndarray) -> float:
    return float(tokens[chosen].sum() / max(1, tokens.sum()))


def _is_near(tokens: np.ndarray, chosen: np.ndarray, share: float) -> bool:
    found = _share(tokens, chosen)
    return share / FAR <= found <= share * FAR and found < 1
