"""A run from request to receipt: stage, create, ship, train, collect, hold, destroy, salvage, move, settle.

Each of these steps is a module of `steps`. `driver` picks the next step from the state in the journal. `supervisor` is
the process that runs the driver. `reaper` ends machines that have no supervisor. `artifacts` downloads files, and
`instance` checks, monitors and ends the machine.
"""
