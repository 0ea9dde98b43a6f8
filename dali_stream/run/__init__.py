"""What a Loader is made of: its checked arguments, the memory that it needs, and the stage that limits it."""
