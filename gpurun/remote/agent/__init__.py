"""The only program on the machine: it unpacks the upload, starts and supervises the trainer, and reports about it.

Standard library only, Python 3.8 or newer, because it is uploaded before anything else: as one file, `agent.pyz`, a zip
that Python runs directly. A verb prints one JSON line, possibly followed by raw bytes, and may be repeated;
docs/FORMATS.md has the protocol. The process that holds `keeper.lock` is the keeper: the kernel releases the lock at
its death, so there is never a second one, and the next verb replaces it.

Imports go one way: `system`, then `processes`, `job_state` and `decompress`, then the verbs; `receive` before
`finish_upload`, and that before `probe` and `job_control`. The keeper's modules (`watchdog`) import at the top,
because a newer zip may replace the file while it runs.
"""
