"""Runs the project's GPU code on a CPU. README.md explains how, and lists the limits."""
