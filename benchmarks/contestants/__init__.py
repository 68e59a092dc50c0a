"""Ways to do the same work: ours, torch's, other packages'; and the work, without a model to train."""
