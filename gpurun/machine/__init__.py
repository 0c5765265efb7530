"""The far side: how a machine is reached, what is shipped to it, and the one program that runs there.

`base` is the boundary, `local` and `remote` (over SSH) fill it in, `pack` makes the stream that is shipped, `agent/`
answers over there, and `far` speaks to it: whatever the far side says is checked before it is believed.
"""
