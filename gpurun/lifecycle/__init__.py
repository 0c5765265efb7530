"""A run from request to receipt: plan, stage, provision, ship, run, collect, destroy, salvage, settle.

Those are the steps. `driver` orders them, by what `state` makes of the journal, in the process that `supervisor` is;
`reap` is the hand that needs none of it. The folders hold what the steps are made of: `quotes` and `corpus` before
anything is rented, `earlier` for what earlier runs give, `instance` to judge what was made, `bucket` and `home` for
the ways there and back.
"""
