"""SchoenbAt inside other libraries, one folder each; every one needs its own extra."""
