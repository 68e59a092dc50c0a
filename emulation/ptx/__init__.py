"""PTX on a CPU: translated to C++, and run in place of kernels."""
