"""What a loader does and how long it takes: counters, traces and metrics."""
