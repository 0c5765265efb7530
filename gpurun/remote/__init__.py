"""The remote side: how a machine is reached, what is uploaded to it, and the one program that runs there.

`interface` is the boundary, which `local_machine` and `ssh/` implement. `agent/` is the program on the machine, and
`client` talks to it: every answer is checked before it is trusted. `archive` selects what is uploaded, `upload` sends
it in parts, `download` brings a file home; `chunks` describes the protocol, and `s3` the bucket.
"""
