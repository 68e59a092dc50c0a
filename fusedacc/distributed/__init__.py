"""What is done where parameters, or gradients, are spread over several processes."""
