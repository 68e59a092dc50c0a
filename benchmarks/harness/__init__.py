"""How all figures are taken: variants timed in turns, rows that are kept, the machine, memory by kind."""
