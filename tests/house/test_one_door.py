"""Tests that code asks a job or a place what it can do, and never of which kind it is."""

from __future__ import annotations

import ast

from house_sources import Source, sources

from gpurun.providers.registry import PROVIDERS

KNOW_THEM = ("gpurun/providers/", "gpurun/core/places.py", "gpurun/core/settings.py", "gpurun/cli/commands/auth.py")
"""The files that may compare a provider's name: they make a place, have its facts, read config.toml, or store a key."""


def constants(node: ast.AST) -> set[object]:
    return {inner.value for inner in ast.walk(node) if isinstance(inner, ast.Constant)}


def is_of_a_kind(node: ast.Compare) -> bool:
    """Return whether this compares the kind of an address, whose `ssh` is not the provider `ssh`."""
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
    """Return the places where a plan's job is asked for its command, which only some jobs have."""
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
