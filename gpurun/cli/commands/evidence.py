"""`gpurun evidence`: pack a run's evidence into one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpurun.cli.options import UsualRun
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb

app = typer.Typer(rich_markup_mode=None)


@verb(app, "evidence", examples=["gpurun evidence fox-41", "gpurun evidence -o card.zip --with-checkpoint"])
def evidence(
    session: Session,
    run: UsualRun = None,
    output: Annotated[str, typer.Option("-o", metavar="FILE", help="Write to this file (default RUN.card.zip).")] = "",
    with_checkpoint: Annotated[
        bool, typer.Option("--with-checkpoint", help="Include the checkpoints, and the shards if they are small.")
    ] = False,
) -> Result:
    """Pack a run's evidence into one file to hand in: card, receipt, journal, log and events.

    The file contains none of your keys and no path of this computer: a file with such a path is left out, and the card
    says so. If a file contains the value of a --secret or of a provider's key, nothing is written.
    """
    from gpurun.cli.render import write_bytes
    from gpurun.cli.run_control import find_meant_run
    from gpurun.cli.shutdown_probe import shutdown_line
    from gpurun.core.credentials import secrets_at_hand
    from gpurun.core.installed_files import bundle_root
    from gpurun.ledger.write_receipt import read_receipt
    from gpurun.readers.evidence.card import pack_card
    from gpurun.readers.evidence.card_additions import card_additions
    from gpurun.remote.agent.runner.masked import forms_of
    from gpurun.view.evidence_card import card_html, card_markdown
    from gpurun.view.number_format import format_bytes

    sight = find_meant_run(session, run)
    folder, plan = sight.folder, sight.plan
    receipt = read_receipt(session.home, folder)
    words = {
        "platform": f"{plan.offer.provider}, {plan.offer.label}",
        "shutdown": shutdown_line(session, folder.name, receipt),
    }
    private = tuple({str(session.home.root), str(Path.home()), str(bundle_root())})
    more = card_additions(folder, plan, {**receipt.predicate}, private)
    pages = {
        "card.md": card_markdown(receipt, **words, more=more.rows, quoted=more.quoted),
        "card.html": card_html(receipt, **words, more=more.rows, quoted=more.quoted, losses=more.losses),
    }
    data = Path(folder.now_at(plan.data.folder)) if plan.data.folder else None  # Path("") would be the working folder.
    at_hand = secrets_at_hand(plan.job.secrets)
    content, left_out = pack_card(
        folder, session.home.keys, plan.model_dump(mode="json"), pages, {**receipt.predicate},
        private=private, with_checkpoint=with_checkpoint, data=data,
        secrets={name: forms_of([value]) for name, value in at_hand.items()},
    )  # fmt: skip
    path = Path(output or f"{folder.name}.card.zip").expanduser()
    write_bytes(path, content, flag="-o")
    said = [f"left out: {name}, because {why}" for name, why in left_out.items()]
    written = {"run": folder.name, "file": str(path), "bytes": len(content), "left_out": left_out}
    return Result(data=written, text="\n".join([f"Wrote {path}, {format_bytes(len(content))}.", *said]))
