"""Attention in linear time for PyTorch, by polynomial (Maclaurin) feature maps of dot-product kernels."""

__version__ = "0.1.0"
