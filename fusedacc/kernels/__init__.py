"""What runs: the operators, the backends, who is selected and why, the checks, the oracle."""
