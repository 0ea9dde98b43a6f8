"""Modules of `train.py`: data, policies, checkpoint, journal, charts and the handler of SIGTERM."""
