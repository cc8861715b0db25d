"""The kernels for all GPUs."""
