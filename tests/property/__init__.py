"""The property test: random models under random events, the wrapper against stock, in lockstep.

`models` draws a network, `events` a list of user actions, `world` performs an action on one network and its
optimizer, `oracle` is stock torch behind the wrapper's interface, with `masters` and loss `scaling` in plain
code, `lockstep` runs both and compares.
"""
