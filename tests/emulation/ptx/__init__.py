"""Translates PTX to C++ and runs it on the CPU in place of the kernels that g++ compiles."""
