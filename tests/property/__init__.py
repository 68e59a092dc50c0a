"""The property test: random models under random events, the wrapper against stock, in lockstep.

`models` draws a network, `events` a list of user actions (`event`), `legality` says which of them the
contract covers. `world` performs an action on one network and its optimizer, `changes` those made by hand:
`edits` of p.grad, `regrouping` of parameters. `oracle` and `collector` are stock torch behind the wrapper's
interface, with `masters` and loss `scaling` in plain code; `lockstep` runs both and compares.
"""
