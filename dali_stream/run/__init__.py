"""What a run is made of: its checked arguments, and its state in a file."""
