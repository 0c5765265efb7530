"""Write the receipt: from the run folder alone, so that a crash before it changes no byte of it."""

from __future__ import annotations

from collections.abc import Iterator

from gpurun.core.progress import Event, RunState
from gpurun.ledger.receipt import write_receipt
from gpurun.lifecycle.context import Context, Note


def settle(state: RunState, context: Context) -> Iterator[Note]:
    """Write and sign the receipt, and put it into the ledger; doing it twice gives the same bytes."""
    written = write_receipt(context.home, context.folder)
    yield Event.RECEIPT_OBSERVED, {"seq": written.seq, "sha256": written.sha256}
