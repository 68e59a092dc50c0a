"""The modules of the demo (`examples/where_it_pays.py`): text, model, loops, measurements, table and plot."""
