"""The only program on the machine: it unpacks the upload, starts and supervises the trainer, and reports about it.

It uses only the standard library and runs on Python 3.8 or newer, because it is uploaded before anything else: as one
file, `agent.pyz`, a zip that Python runs directly. A verb prints one JSON line, possibly followed by raw bytes, and may
be repeated. docs/FORMATS.md has the protocol. The process that has the lock `keeper.lock` is the keeper. The kernel
releases the lock when the keeper dies, so there is never a second keeper, and the next verb starts a new one.

Imports go in one direction: `system`, then `processes`, `job_state` and `decompress`, then the verbs; `receive` before
`finish_upload`, and `finish_upload` before `probe` and `job_control`. The keeper's modules (`watchdog`) import
everything at the top, because a newer zip may replace the file while the keeper runs.
"""
