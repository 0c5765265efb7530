"""The far side's only program: it unpacks what is shipped, starts and keeps the trainer, and answers for it.

Standard library only, Python 3.8 or newer, because it is shipped before anything else: as one file, `agent.pyz`, a zip
that Python runs as it is. A verb prints one JSON line, then perhaps raw bytes, and may be repeated; docs/FORMATS.md has
the protocol. The process that holds `keeper.lock` is the keeper: the kernel frees the lock at its death, so there is
never a second one, and the next verb replaces it.

Imports flow one way: `system`, then `processes`, `job_state` and `decompress`, then the verbs; `receive` before
`finish_upload`, and that before `probe` and `job_control`. The keeper's (`watchdog`) stand at the top of their modules,
as the zip may be replaced by a newer one while it runs.
"""
