"""What `train.py` is made of: data, policies, checkpoint, journal, charts and the answer to SIGTERM."""
