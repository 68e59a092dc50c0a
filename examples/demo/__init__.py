"""The parts of the byte-level transformer demo: model, loops, measurements, report."""
