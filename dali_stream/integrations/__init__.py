"""Use of `Loader` in the training scripts of other projects."""
