"""Training on real models, on this machine and on lesser ones that it emulates."""
