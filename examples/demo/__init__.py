"""The parts of the demo (`examples/where_it_pays.py`): texts, model, loops, measurements, table, plot."""
