"""Runs the project's GPU code on a CPU; README.md tells how, and what it cannot show."""
