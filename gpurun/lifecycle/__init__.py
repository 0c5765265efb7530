"""A run from request to receipt: stage, create, ship, train, collect, hold, destroy, salvage, move, settle.

Each of these is a module of `steps`. `driver` picks the next one from the state in the journal; `supervisor` is the
process that does this; `reaper` ends machines without a supervisor. `artifacts` brings files home, and `instance`
judges, monitors and ends the machine.
"""
