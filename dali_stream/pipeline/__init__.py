"""Pipeline that carries out the schedule: it reads and decodes data, runs the DALI graph, and assembles batches."""
