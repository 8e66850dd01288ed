"""Choose the rows to hold out for evaluation, as a function of the seed, the share and the rows' token counts."""

from __future__ import annotations

import numpy as np

from dualtune.errors import DataError

FAR = 2.0  # factor by which the held-out share of the tokens may differ from the requested share


def held_out(num_rows: int, share: float, seed: int) -> np.ndarray:
    """Return bool [num_rows], the held-out rows: for `share` > 0 at least one, but never all.

    Depends only on the arguments.
    """
    number = min(max(1, round(share * num_rows)), num_rows - 1) if share else 0
    chosen = np.zeros(num_rows, bool)
    chosen[np.random.default_rng([seed, 0]).permutation(num_rows)[:number]] = True
    return chosen


def probe_documents(num_documents: int, number: int, seed: int) -> list[int]:
    """Return the indices of the training documents held out to probe a step. Raises DataError if there are too few.

    Depends only on the arguments.
    """
    if number and number >= num_documents:
        raise DataError(
            f"{number} training documents are needed as probes, but there are only {num_documents}. Use more data"
        )
    return sorted(np.random.default_rng([seed, 5]).permutation(num_documents)[:number].tolist())


def held_out_tokens(tokens: np.ndarray, share: float, seed: int) -> tuple[np.ndarray, str]:
    """Return bool [rows], the held-out rows, and a remark if the share cannot be met.

    `tokens` is the number of tokens of each row. The rows are those of `held_out`, unless their share of the tokens
    is less than half or more than twice `share`: then rows are chosen by their token counts.
    """
    chosen = held_out(len(tokens), share, seed)
    if not share or _is_near(tokens, chosen, share):
        return chosen, ""
    order = np.random.default_rng([seed, 0]).permutation(len(tokens))
    order = order[tokens[order] > 0]
    if len(order) < 2:
        return np.zeros(len(tokens), bool), (
            f"none: data.eval is {share:.0%} of the rows, but only one row can be trained on. "
            "Split the row, name evaluation data in data.eval, or set it to 0"
        )
    chosen = _by_tokens(tokens, order, share)
    if _is_near(tokens, chosen, share):
        return chosen, ""
    found = f"{_share(tokens, chosen):.0%} of the tokens are held out, but data.eval is {share:.0%}"
    return chosen, f"{found}: there are too few rows, and their lengths differ too much. Split the longest rows"


def _by_tokens(tokens: np.ndarray, order: np.ndarray, share: float) -> np.ndarray:
    """Take rows in this order, each one that brings their token sum closer to the share; at least one, never all."""
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
