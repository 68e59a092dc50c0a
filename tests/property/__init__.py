"""The property test: random models and events, with the wrapper and with plain PyTorch, compared after each.

`models` creates a random network, and `events` a list of user actions (`event`). `legality` says which of
them the contract defines. `world` performs an action on a network and its optimizer, and `changes` those made
by hand: `edits` of p.grad, `regrouping` of parameters. `oracle` and `collector` are plain PyTorch with the
wrapper's interface, with `masters` and loss `scaling` in plain code. `lockstep` runs both and compares.
"""
