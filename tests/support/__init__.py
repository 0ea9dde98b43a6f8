"""Helpers that the tests share. Fixtures of all tests are in `conftest.py`, `driver`, `stores` and `train`.

data        `datasets`: the builder of small datasets, reading and changing datasets. `videos`: small videos, datasets around
            them, MP4 boxes. `batches`: which frames a batch holds, and whether two are the same.
network     `servers`: files over HTTP. `clouds`: the Hub and S3. `faults`: how a server fails. `stores`: stores on them.
programs    `programs`: runs of `dali-stream`. `doctor`, `tools`, `train`: runs of single commands. `cluster`: SLURM.
pace        `slow`: parameters and examples that `make test` leaves to `make test-slow`.
driver      `driver`: a fake CUDA driver, built from `driver.c`.
reference   `parity_with_lerobot`: a program that compares batches with LeRobot's reader.
"""
