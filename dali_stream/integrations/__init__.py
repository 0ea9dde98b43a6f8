"""A Loader inside the training programs of other projects."""
