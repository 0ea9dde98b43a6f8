"""Shared by `reshard` and `transcode`: both rewrite a dataset into a local folder, and can be interrupted and resumed.

checks   checks before anything is written, and the identity of a run
folder   the output folder: resuming, and writing nothing outside it
work     jobs in several threads, with progress
copy     files copied unchanged, and packets of a video file
"""
