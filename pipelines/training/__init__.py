"""Modules of `train.py`: data, checkpoints, journal, charts and the handler of SIGTERM."""
