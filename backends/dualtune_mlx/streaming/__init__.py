"""Layer streaming: a base larger than memory, whose layers are read from their files each time they compute."""

from dualtune_mlx.streaming.passes import Streaming
from dualtune_mlx.streaming.residency import Residency, check_streamable

__all__ = ["Residency", "Streaming", "check_streamable"]
