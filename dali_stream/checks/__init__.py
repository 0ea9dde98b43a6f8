"""Checks of what comes from outside: arguments, files that others wrote, sizes on command lines, and texts in messages."""
