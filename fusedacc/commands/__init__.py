"""The commands of `python -m fusedacc`."""
