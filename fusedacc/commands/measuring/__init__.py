"""The measuring library of `bench`, `benchmarks/` and the demo.

- `timing`: run variants in turns, by the host's clock or CUDA events; quantiles, ratios with intervals.
- `machine`: what a figure depends on: device, memory, versions, commit.
- `records`: figures as rows of a CSV file and as a table.
- `plots`: colours, style, titles, keys and bars of every picture.

Peak memory is recorded by `fusedacc.planner.allocations`.
"""
