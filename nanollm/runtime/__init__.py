"""HOW it runs: one process per rank, each with a ModelRunner; rank 0's plans tell it what to compute."""
