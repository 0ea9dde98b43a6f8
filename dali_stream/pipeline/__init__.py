"""Pipeline that carries out the schedule: reading, decoding, the DALI graph and the assembly of batches."""
