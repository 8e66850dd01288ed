"""Where the memory of a run goes: snapshots by step and phase, and the peak, spikes and leaks in them."""
