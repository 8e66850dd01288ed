"""What a person sees of a run: its report, its live view, trackers, and the server of its page."""
