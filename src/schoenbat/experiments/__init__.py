"""One file for each figure or table; every experiment yields plain rows and prints nothing."""
