"""Whatever is watched, and however: the training computes what it does without, to the bit."""
