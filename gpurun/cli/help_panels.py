"""Shows the flags of a command in named panels, the most common flags first."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

OPTIONS, EVERY_VERB = "Options", "Every verb"
PANELS: dict[str, tuple[str, ...]] = {
    OPTIONS: (),
    "Rent": (
        "--gpu", "--max-cost", "--provider", "--region", "--hours", "--spot", "--keep-going", "--dry-run", "--from",
        "--max-gpu-hours", "--yes", "--name", "--detach", "--no-wait",
    ),
    "Data": (
        "--data", "--stage", "--upload", "--git", "--include", "--exclude", "--accept-skipped", "--init", "--outputs",
        "--sync", "--output-gb", "--keep-checkpoints", "--warm",
    ),
    "Program": (
        "--set", "--trainer", "--challenge", "--core-bundle", "--env", "--secret", "--pass-env", "--pip", "--image",
        "--setup", "--setup-limit", "--disk", "--jupyter", "--checkpoint-glob", "--resume-arg", "--total-steps",
        "--dry-run-seconds",
    ),
    "Watch and messages": ("--log-to", "--notify", "--exec", "--on-interrupt"),
    "When it ends": (
        "--idle", "--silent", "--give-up-after", "--hold-on-failure", "--stop-signal", "--grace",
    ),
    "Boxes and clusters": (
        "--host", "--host-key", "--identity", "--jump", "--python", "--price-per-hour", "--queue",
        "--partition", "--time", "--account", "--qos", "--slow-network",
    ),
    "Rare": (
        "--legs", "--wait", "--until", "--max-rate", "--accept-cpu", "--accept-weak-lease", "--lambda-guard",
    ),
    EVERY_VERB: ("--json", "--quiet", "--verbose", "--color", "--no-input", "--home", "--no-progress", "--help"),
}  # fmt: skip
"""The flags of each panel; a flag without a panel is specific to its command, and comes first."""
_PANEL_OF = {flag: panel for panel, flags in PANELS.items() for flag in flags}
_PLACE = {flag: place for flags in PANELS.values() for place, flag in enumerate(flags)}
WIDE = 24


def long_name(option: Any) -> str:
    """Return the long name of an option, e.g. `--quiet` for `-q`."""
    return next((name for name in option.opts if name.startswith("--")), str(option.opts[0]))


def group_by_panel(options: list[Any]) -> dict[str, list[Any]]:
    """Return the options of each panel, in the order of the panels, without empty panels."""
    found: dict[str, list[Any]] = {panel: [] for panel in PANELS}
    for option in options:
        found[_PANEL_OF.get(long_name(option), OPTIONS)].append(option)
    for panel in PANELS:
        found[panel].sort(key=lambda option: _PLACE.get(long_name(option), 0))
    return {panel: options for panel, options in found.items() if options}


class PanelledCommand(TyperCommand):
    """A command whose help shows the flags in panels."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and then the panels into the help."""
        shown = [parameter for parameter in self.get_params(ctx) if parameter.get_help_record(ctx)]
        arguments = [parameter.get_help_record(ctx) for parameter in shown if parameter.param_type_name == "argument"]
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        options = group_by_panel([parameter for parameter in shown if parameter.param_type_name == "option"])
        for panel, members in options.items():
            records = [option.get_help_record(ctx) for option in members]
            with formatter.section(panel):
                formatter.write_dl([(name.ljust(WIDE), words) for name, words in records])


def make_verb_group(usual: str = "--help") -> type[TyperGroup]:
    """Return a class for a group of commands; if no command is typed, the group runs the command `usual`."""

    class Group(TyperGroup):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            return super().parse_args(ctx, args or [usual])

    return Group
