"""One file per table of docs/figures.md, and the checks that only a GPU can answer. Each is a command."""
