"""Files, text, errors, signals, fault points, versions, the world of processes: what everything stands on."""
