"""Access to a machine: how it is reached, what is uploaded to it, and gpurun's program on it.

`interface` defines a machine, which `local_machine` and `ssh/` implement. `agent/` is the program on the machine, and
`client` calls it and checks every reply before it is trusted. `archive` selects what is uploaded, `upload` sends it in
parts, and `download` downloads a file. `chunks` describes the protocol, and `s3` the bucket.
"""
