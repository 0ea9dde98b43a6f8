"""From the schedule to batches: the external source, the DALI graph and its iterator."""
