"""What the machine code of the GPU kernels says about their speed, without a GPU."""
