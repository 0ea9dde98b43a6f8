"""This process and its machine: rank, cores, memory limits, worker threads, log records, and commands that install."""
