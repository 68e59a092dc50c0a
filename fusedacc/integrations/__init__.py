"""Thin adapters to training frameworks: import the one that you use; none is imported from here.

`scheduler` and `distributed_checkpoint` need torch alone; `accelerate`, `transformers`, `lightning`, `fastai`
and `keras` each need the package of that name. docs/integrations.md says what to write with each.
"""
