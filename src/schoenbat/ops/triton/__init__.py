"""The fused GPU kernels, in Triton: import only where there is a GPU, or the interpreter."""
