"""Takes gradients before autograd stores them."""
