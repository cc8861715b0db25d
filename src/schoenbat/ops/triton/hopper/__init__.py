"""Kernels for Hopper's warp groups, in Gluon: see `warp_groups`."""
