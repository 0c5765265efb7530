"""`gpurun pack`: show or write exactly what a run would upload."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpurun.cli.render import put_bytes
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb
from gpurun.core.errors import ExitCode, SetupError, UsageError
from gpurun.core.paths import fsync_file, is_stream

if TYPE_CHECKING:
    from gpurun.remote.archive import Pack, Survey

app = typer.Typer(rich_markup_mode=None)


@verb(app, "pack", examples=["gpurun pack ./shards --dry-run", "gpurun pack ./shards -o shards.tar.zst"])
def pack(
    session: Session,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to upload.")],
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Write the pack to this file.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the files, with sizes and refusals.")] = False,
    allow_secret: Annotated[
        list[Path] | None,
        typer.Option("--allow-secret", metavar="PATH", help="Upload this file; it does not contain a key."),
    ] = None,
) -> Result:
    """Show what would be uploaded, or write it to a file."""
    from gpurun.remote.archive import Pack, survey
    from gpurun.view.number_format import format_files

    if not folder.exists():
        raise UsageError(
            "pack.missing", f"{folder} does not exist.", hint="Name a folder of data: gpurun pack ./shards"
        )
    if output == "-" and session.json and not dry_run:
        hint = "Name a file: -o shards.tar.zst"
        raise UsageError("pack.two_outputs", "--json and -o - cannot both use standard output.", hint=hint)
    allowed = [path.parent.resolve() / path.name for path in allow_secret or ()]
    for path in allowed:
        if not (path.exists() and path.is_relative_to(folder.resolve())):
            what = f"--allow-secret {path} is not in {folder.resolve()}."
            raise UsageError("pack.not_there", what, hint="Name a path below the folder.")
    seen = survey({"data": folder}, [str(path) for path in allowed])
    if dry_run or not output:
        return _list_packed_files(session, seen)
    seen.demand_clean()
    pack = Pack(seen)
    packed_bytes = _write_pack(pack, output)
    data = {
        "output": output,
        "manifest_sha256": pack.manifest_sha256,
        "bytes": seen.total_bytes,
        "packed_bytes": packed_bytes,
    }
    summary = f"{output}: {format_files(len(seen.files))}, {packed_bytes:,} bytes, {pack.manifest_sha256}"
    return Result(data=data, text="" if output == "-" else summary)


def _list_packed_files(session: Session, seen: Survey) -> Result:
    from gpurun.view.list_tables import PackRow, pack_listing

    files = [PackRow(name=file.name, bytes=file.bytes) for file in seen.files]
    files += [PackRow(name=no.path, bytes=0, refusal=no.reason) for no in seen.refusals]
    data = {
        "files": [{"name": file.name, "bytes": file.bytes} for file in seen.files],
        "bytes": seen.total_bytes,
        "refused": [{"path": no.path, "reason": no.reason, "code": no.code} for no in seen.refusals],
    }
    code = ExitCode.USAGE if seen.refusals else ExitCode.DONE
    return Result(data=data, text=session.draw(pack_listing(files, session.style)), exit_code=code)


def _write_pack(pack: Pack, output: str) -> int:
    """Write the pack to standard output (`-`) or to a file that appears only when it is complete; return its size."""
    if output == "-":
        return sum(map(put_bytes, pack.stream()))
    part = Path(f"{output}.part")
    try:
        if is_stream(Path(output)):
            with open(output, "wb") as stream:
                return sum(map(stream.write, pack.stream()))
        with part.open("wb") as out:
            for chunk in pack.stream():
                out.write(chunk)
            out.flush()
            fsync_file(out.fileno())
        size = part.stat().st_size
        part.replace(output)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise SetupError("pack.cannot_write", f"{output} cannot be written: {error.strerror}.",
                         hint="Choose another path with -o, or free some space.") from None  # fmt: skip
    return size
