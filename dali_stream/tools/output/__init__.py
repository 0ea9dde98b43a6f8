"""What `reshard` and `transcode` have in common: they rewrite a dataset into a local folder, and can be cut short.

checks   what has to hold before anything is written, and what makes a run the same as an earlier one
folder   the folder that is written: resuming, and nothing outside it
work     several things at a time, and how far they are
copy     files that stay as they are
samples  encoded frames of a video file
"""
