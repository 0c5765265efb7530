"""The far side: how a machine is reached, what is shipped to it, and the one program that runs there.

`interface` is the boundary, `local_machine` and `ssh/` fill it in, `agent/` answers over there, and `client` speaks to
it: whatever the far side says is checked before it is believed. `archive` says what is shipped, `upload` sends it in
parts, `download` brings a file home: `chunks` tells how, and `s3` tells of the bucket.
"""
