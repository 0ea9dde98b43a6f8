"""Checks of input: arguments, files that others wrote, sizes on command lines, and texts in messages."""
