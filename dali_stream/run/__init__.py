"""What a run is made of: its checked arguments, its description, its state in a file, and the replay of a batch."""
