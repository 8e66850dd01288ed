"""`memory.limit` on backends that cannot enforce it: a peak above the limit counts as a shortage of memory.

The peak is read after each micro-batch, without synchronizing. Where the device still computes the micro-batch then, as
MLX does, an excess is seen one micro-batch later, or in the next step. That is late, but never missed: the peak only
grows until `restart`, and the smaller cut gives the same result from any step on.
"""

from __future__ import annotations

from dualtune.backend import Backend
from dualtune.text.show import in_bytes


class WatchedLimit:
    """Compares the peak with the bytes that arrays may take."""

    def __init__(self, backend: Backend | None = None, limit_bytes: int | None = None) -> None:
        """Without a backend or a limit, nothing exceeds it."""
        self._backend, self._limit_bytes = backend, limit_bytes

    def excess(self) -> str:
        """Return by how much the limit was exceeded since `restart`; empty if it was not."""
        if self._backend is None or self._limit_bytes is None:
            return ""
        peak = self._backend.memory().peak_bytes
        if peak <= self._limit_bytes:
            return ""
        return f"{in_bytes(peak)} were in use, and memory.limit leaves {in_bytes(self._limit_bytes)} for arrays"

    def restart(self) -> None:
        """Count the peak anew. This synchronizes the device, where what was discarded may still be computed."""
        if self._backend is not None and self._limit_bytes is not None:
            self._backend.synchronize()
            self._backend.reset_peak_memory()
