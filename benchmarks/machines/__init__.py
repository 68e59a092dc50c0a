"""Training of real models on this machine, and on smaller machines that it emulates."""
