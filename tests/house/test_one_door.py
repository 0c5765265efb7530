"""Nobody asks which job or which place there is: both are asked for what they can do."""

from __future__ import annotations

import ast

from house_sources import Source, sources

from gpurun.providers.registry import PROVIDERS

KNOW_THEM = ("gpurun/providers/", "gpurun/core/places.py", "gpurun/core/settings.py", "gpurun/cli/commands/auth.py")
"""Where a place is made, what is known of it by its name, a table of config.toml, and the verb that keeps a key."""


def constants(node: ast.AST) -> set[object]:
    return {inner.value for inner in ast.walk(node) if isinstance(inner, ast.Constant)}


def is_of_a_kind(node: ast.Compare) -> bool:
    """Whether it asks for the kind of an address, `ssh` or `folder`, which is none of a provider."""
    return isinstance(node.left, ast.Attribute) and node.left.attr == "kind"


def test_no_providers_name_is_compared_outside_its_own_room() -> None:
    places = [
        source.at(node)
        for source in sources("gpurun")
        if not source.path.startswith(KNOW_THEM)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Compare) and constants(node) & set(PROVIDERS) and not is_of_a_kind(node)
    ]
    assert not places, "\n".join(places)


def kinds_asked(source: Source) -> list[str]:
    """Where a plan is asked for what one kind of job alone has."""
    return [
        source.at(node)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and node.attr == "command" and ast.unparse(node.value).endswith("plan.job")
    ]


def test_no_plan_is_asked_for_its_command_outside_of_jobs() -> None:
    places = [
        at for source in sources("gpurun") if not source.path.startswith("gpurun/jobs/") for at in kinds_asked(source)
    ]
    assert not places, "\n".join(places)
