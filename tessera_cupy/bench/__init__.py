"""Real video tokens, and the demonstration that runs the whole pipeline on them."""
