"""Defines the command tree. A command's module is imported only to run the command or to show its help."""

from __future__ import annotations

import errno
import gc
import io
import keyword
import os
import re
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from gpurun import __version__
from gpurun.cli.render import OutputLost, make_output_lost, put, render_result, without_output
from gpurun.cli.result import Result
from gpurun.cli.verb import COMMON, with_flags
from gpurun.core.errors import ExitCode, UsageError

VERBS = {
    "offers": ("List GPUs for rent, cheapest first: live prices from clouds with a key, else the packaged catalogue."),
    "plan": "Show how long a run would take and what it would cost on each offer. Spends nothing.",
    "train": "Rent a machine, train, download the checkpoints, and prove that the machine is gone.",
    "notebook": "Write a notebook that trains a recipe on Colab, Kaggle or Jupyter and saves evidence to import.",
    "import": "Import the evidence of a notebook as a run, and sign a receipt that claims no more than its log shows.",
    "run": "Rent a machine, run any command on it, download its outputs, and prove that the machine is gone.",
    "dev": "Rent a machine to work on by shell, editor or JupyterLab; it ends automatically when it is idle.",
    "sweep": "Try many settings of a recipe or a command on one machine, and download the best.",
    "ps": "List unfinished runs; runs that may be billing without a supervisor come first.",
    "attach": "Watch a run live; closing the view does not affect the run.",
    "wait": "Wait silently until a run ends, and exit with its exit code. Ctrl-C stops only the waiting.",
    "logs": "Print a run's log, even after the machine is gone.",
    "ssh": "Log in to a run's machine, or run a command on it, without affecting the run.",
    "forward": "Forward ports of a run's machine to 127.0.0.1, until Ctrl-C or until the machine ends.",
    "ssh-config": "Write an ssh entry for each run's machine, for scp, rsync, editors and git.",
    "stop": "Save and download a checkpoint, destroy the machine, and write the receipt.",
    "resume": "Resume an unfinished run after a crash, sleep or reboot.",
    "collect": ("Download finished checkpoints while training continues, or list those of a finished run."),
    "rm": "Delete the downloaded files of finished runs; journal, receipt, log and curves stay.",
    "destroy": "Destroy the machine now, without downloading anything, and prove that it is gone.",
    "receipt": "Show a run's signed receipt.",
    "audit": "Check journals, receipts, signatures, costs and checkpoints by computing them again.",
    "evidence": "Pack a run's evidence into one file to hand in: card, receipt, journal, log and events.",
    "roster": "Give each learner of a class a challenge.",
    "budget": "Show what is left of each budget, how much each run holds, and what receipts say was spent.",
    "mandate": "Write, show and revoke mandates: what an agent may spend.",
    "mcp": "Serve an agent over standard input and output, within a mandate.",
    "reap": "Find every machine with gpurun's token on every cloud, and end those past their deadline.",
    "report": ("Compare runs: loss by step, token, second and dollar, settings, and samples side by side."),
    "sample": "Generate or translate text on this computer with a run's checkpoint and its recipe's defaults.",
    "eval": "Score a run's checkpoint on this computer, on a public benchmark.",
    "export": "Export a run's checkpoint, with a model card, or its curves for other tools.",
    "confirm-shutdown": "Check that your own box has stopped answering after a run, and sign that beside the receipt.",
    "pack": "Show what would be uploaded, or write it to a file.",
    "help": "Show a verb's help or a page of the handbook; without a topic, list both.",
    "doctor": "Check this computer and its keys; with --online also ask the clouds about keys and leftovers.",
    "version": "Show the versions of gpurun and of Python.",
    "auth": "Store, show and remove the keys of clouds; install gpurun's own key on a box.",
    "aws": "Set up an AWS account for gpurun.",
    "recipes": "List, show and check the recipes.",
    "data": "Make shards from text, and check them.",
    "config": "Show the settings and where each one comes from.",
}
"""Each command, with the first line of its function's docstring in its module (see `module_of`)."""

GROUPS = {
    "Rent and train": ("offers", "plan", "train", "run", "dev", "sweep", "stop", "resume", "collect", "destroy"),
    "Train elsewhere": ("notebook", "import"),
    "Look": ("ps", "attach", "wait", "logs", "report", "sample", "eval", "export"),
    "Log in": ("ssh", "forward", "ssh-config"),
    "Money": ("budget", "mandate", "mcp", "receipt", "audit", "reap", "confirm-shutdown"),
    "Hand in": ("evidence", "roster"),
    "Data": ("data", "recipes", "pack", "rm"),
    "Set-up": ("help", "doctor", "auth", "aws", "config", "version"),
}
"""The groups of commands in the help."""


def module_of(verb: str) -> str:
    """Return the name of a command's module: hyphens become underscores, and a Python keyword ends with one."""
    return verb.replace("-", "_") + ("_" if keyword.iskeyword(verb) else "")


_NO_VERB = re.compile(r"No such command '([\w-]+)'")
OTHER_WORDS = {
    "status": "ps --all", "list": "ps --all", "ls": "ps --all", "queue": "ps", "show": "receipt", "info": "receipt",
    "watch": "attach", "follow": "attach", "top": "attach", "tail": "logs -f", "log": "logs",
    "launch": "run", "submit": "run",
    "start": "train", "exec": "run", "create": "train", "up": "train", "init": "recipes new", "down": "destroy",
    "kill": "destroy", "terminate": "destroy", "cancel": "stop", "delete": "rm", "clean": "rm", "download": "collect",
    "pull": "collect", "prices": "offers", "price": "offers", "gpus": "offers", "show-gpus": "offers", "cost": "budget",
    "bill": "audit --against-bill", "login": "auth set", "key": "auth set", "keys": "auth status", "check": "doctor",
    "settings": "config show", "verify": "audit", "test": "train --dry-run", "demo": "train --dry-run",
}  # fmt: skip
"""Commands of other tools, with gpurun's command for the same purpose."""


class LazyVerbs(TyperGroup):
    """A group of commands that shows the VERBS under headings, and imports a module only when it is needed."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given | {"commands": dict.fromkeys(VERBS)})  # Click suggests these names in "Did you mean".

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import and return a command, or a group of commands; None if it does not exist."""
        if cmd_name not in VERBS:
            return None
        module = import_module(f"gpurun.cli.commands.{module_of(cmd_name)}")
        group = typer.main.get_group(module.app)
        return group.commands.get(cmd_name, group)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands into the help, in groups, without importing their modules."""
        wide = max(map(len, VERBS))
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(wide), VERBS[name]) for name in names])


def build_app() -> typer.Typer:
    """Build and return the whole command line."""
    app = typer.Typer(
        name="gpurun",
        cls=LazyVerbs,
        help=options_of_all.__doc__,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        pretty_exceptions_show_locals=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(options_of_all)
    return app


def _print_version(is_given: bool) -> None:
    if is_given:
        put(f"gpurun {__version__}")
        raise typer.Exit


def options_of_all(**given: Any) -> None:
    """Rent a GPU under a hard dollar cap, train, download the checkpoints, and prove that the machine is gone."""


_VERSION = typer.Option("--version", help="Show gpurun's version.", is_eager=True, callback=_print_version)
with_flags(options_of_all, {"version": (Annotated[bool, _VERSION], False), **COMMON})


def run_app(app: typer.Typer) -> int:
    """Parse the command line, run it and return the exit code; with `--json`, usage errors are JSON too."""
    try:
        code = typer.main.get_command(app).main(standalone_mode=False)
    except typer.TyperException as wrong:
        if type(wrong).__name__ == "NoArgsIsHelpError":
            return render_result("", False, Result(text=str(wrong), exit_code=ExitCode.USAGE), None)
        # The command that was parsed: "gpurun ps", or just "gpurun" for an unknown command.
        said_by = getattr(getattr(wrong, "ctx", None), "command_path", "gpurun")
        what, hint = wrong.format_message(), f"{_example_sentence(wrong)}See: {said_by} --help"
        if (found := _NO_VERB.match(what)) and found[1] in OTHER_WORDS:
            what, hint = f"There is no verb {found[1]!r}.", f"Use: gpurun {OTHER_WORDS[found[1]]}"
        error = UsageError("usage", what, hint=hint)
        return render_result("", "--json" in sys.argv, Result(errors=(error,), exit_code=ExitCode.USAGE), None)
    except OutputLost as loss:
        return without_output(loss, Result(), None)
    except OSError as error:  # Typer itself prints the help, which can fail.
        if error.errno != errno.ENOSPC:
            raise
        return without_output(make_output_lost(error), Result(), None)
    except SystemExit as left:  # Typer exits this way if the help's reader has closed the pipe.
        if not isinstance(left.__context__, BrokenPipeError):
            raise
        return without_output(make_output_lost(left.__context__), Result(), None)
    return code if isinstance(code, int) else 0


def _example_sentence(wrong: Any) -> str:
    """Return a sentence with an example if an argument is missing; else ""."""
    command = getattr(getattr(wrong, "ctx", None), "command", None)
    examples = [
        line.strip() for line in str(getattr(command, "help", "")).splitlines() if line.strip().startswith("$ ")
    ]
    is_missing = type(wrong).__name__ == "MissingParameter" and examples
    return f"For example: {examples[0].removeprefix('$ ')}. " if is_missing else ""


def main() -> None:
    """Run the command line and exit with its code."""
    os.environ.setdefault(
        "PYDANTIC_DISABLE_PLUGINS", "__all__"
    )  # pydantic would search for plugins, which takes longer than most commands.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # The terminal may not be UTF-8, or a file name may not be valid text.
    code = run_app(build_app())
    gc.freeze()  # Garbage collection at exit would take a tenth of a short command's time.
    sys.exit(code)


if __name__ == "__main__":
    main()
