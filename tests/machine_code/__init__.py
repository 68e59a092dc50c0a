"""Predicts the speed of the GPU kernels from their machine code, without a GPU."""
