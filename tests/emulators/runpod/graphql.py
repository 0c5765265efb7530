"""The part of RunPod's GraphQL that gpurun and its guard use: a parser, four fields, and RunPod's errors."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from tests.emulators.runpod.problems import Problem
from tests.emulators.runpod.world import World

_TOKEN = re.compile(r'\s*(?:,\s*)*("(?:[^"\\\n]|\\.)*"|-?\d+(?:\.\d+)?|[A-Za-z_]\w*|[{}()\[\]:])')


class QueryError(Exception):
    """An error whose text is the answer's errors[0].message."""


@dataclass
class Field:
    name: str
    alias: str
    arguments: dict[str, Any] = field(default_factory=dict)
    fields: list[Field] = field(default_factory=list)


class Parser:
    """A parser for a document of one operation without variables or fragments."""

    def __init__(self, document: str) -> None:
        self.tokens: list[str] = []
        at = 0
        document = document.rstrip().rstrip(",")
        while at < len(document):
            match = _TOKEN.match(document, at)
            if match is None:
                raise QueryError(f"Syntax Error: Unexpected character at {at}.")
            self.tokens.append(match[1])
            at = match.end()
        self.at = 0

    def operation(self) -> tuple[str, list[Field]]:
        kind = "query" if self._peek() == "{" else self._next()
        if kind not in ("query", "mutation"):
            raise QueryError(f'Syntax Error: Unexpected Name "{kind}".')
        if self._peek() != "{":
            self._next()
        found = self.selection()
        if self.at != len(self.tokens):
            raise QueryError("Syntax Error: Expected <EOF>.")
        return kind, found

    def selection(self) -> list[Field]:
        self._expect("{")
        found = []
        while self._peek() != "}":
            alias = name = self._next()
            if self._peek() == ":":
                self._next()
                name = self._next()
            arguments = self._pairs("(", ")") if self._peek() == "(" else {}
            found.append(Field(name, alias, arguments, self.selection() if self._peek() == "{" else []))
        self._expect("}")
        return found

    def value(self) -> Any:
        token = self._peek()
        if token == "{":
            return self._pairs("{", "}")
        if token == "[":
            self._next()
            items = []
            while self._peek() != "]":
                items.append(self.value())
            self._expect("]")
            return items
        self._next()
        if token.startswith('"'):
            return json.loads(token)
        return {"true": True, "false": False, "null": None}.get(token, token if token[0].isalpha() else Decimal(token))

    def _pairs(self, begin: str, end: str) -> dict[str, Any]:
        self._expect(begin)
        found = {}
        while self._peek() != end:
            name = self._next()
            self._expect(":")
            found[name] = self.value()
        self._expect(end)
        return found

    def _peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def _next(self) -> str:
        token = self._peek()
        if not token:
            raise QueryError("Syntax Error: Unexpected <EOF>.")
        self.at += 1
        return token

    def _expect(self, token: str) -> None:
        if self._next() != token:
            raise QueryError(f'Syntax Error: Expected "{token}".')


def execute(document: str, world: World, own_pod: str | None) -> dict[str, Any]:
    """Return the data that a document requests. A pod's key (`own_pod`) may only terminate its own pod."""
    kind, fields = Parser(document).operation()
    known = {"query": {"myself": _myself, "gpuTypes": _gpu_types}, "mutation": {"podRentInterruptable": _rent}}
    data: dict[str, Any] = {}
    for wanted in fields:
        if kind == "mutation" and wanted.name == "podTerminate":
            data[wanted.alias] = _terminate(wanted.arguments["input"]["podId"], world, own_pod)
            continue
        if own_pod is not None:
            raise QueryError("You do not have permission to perform this action.")
        resolver = known[kind].get(wanted.name)
        if resolver is None:
            raise QueryError(f'Cannot query field "{wanted.name}" on type "{kind.title()}".')
        data[wanted.alias] = _chosen(resolver(world, wanted.arguments), wanted.fields)
    return data


def _chosen(value: Any, fields: list[Field]) -> Any:
    """Return only the requested fields of a value."""
    if isinstance(value, list):
        return [_chosen(item, fields) for item in value]
    if not isinstance(value, dict):
        return value
    found = {}
    for wanted in fields:
        if wanted.name not in value:
            raise QueryError(f'Cannot query field "{wanted.name}" on type "Object".')
        inner = value[wanted.name]
        found[wanted.alias] = _chosen(inner(wanted.arguments) if callable(inner) else inner, wanted.fields)
    return found


def _myself(world: World, arguments: dict[str, Any]) -> Any:
    return {
        "id": world.customer, "email": "you@example.com", "clientBalance": float(world.balance),
        "currentSpendPerHr": float(sum(pod.rate for pod in world.alive)), "spendLimit": 80,
    }  # fmt: skip


def _gpu_types(world: World, arguments: dict[str, Any]) -> Any:
    wanted = arguments.get("input", {}).get("id")

    def entry(kind: Any) -> dict[str, Any]:
        def lowest(given: dict[str, Any]) -> Any:
            order = given.get("input", {})
            _check_fields(order, {"gpuCount", "secureCloud"}, "GpuLowestPriceInput")
            cloud = "secure" if order.get("secureCloud") else "community"
            level = kind.level(cloud, int(order.get("gpuCount", 1)))
            return {
                "stockStatus": None if level == "NONE" else level.title(),
                "minimumBidPrice": None if level == "NONE" else float(kind.bid[cloud]),
                "uninterruptablePrice": float(kind.price[cloud]),
            }

        return {"id": kind.id, "displayName": kind.name, "memoryInGb": kind.memory, "lowestPrice": lowest}

    return [entry(kind) for kind in world.gpus.values() if wanted in (None, kind.id)]


def _check_fields(order: dict[str, Any], known: set[str], kind: str) -> None:
    """Raise QueryError for unknown names; minCudaVersion must be a String and supportPublicIp a Boolean."""
    for name in set(order) - known - {"minCudaVersion", "supportPublicIp"}:
        raise QueryError(f'Field "{name}" is not defined by type "{kind}".')
    if not isinstance(order.get("minCudaVersion", ""), str):
        raise QueryError("String cannot represent a non string value.")
    if not isinstance(order.get("supportPublicIp", True), bool):
        raise QueryError("Boolean cannot represent a non boolean value.")


def _rent(world: World, arguments: dict[str, Any]) -> Any:
    order = arguments["input"]
    known = {
        "name", "imageName", "gpuTypeId", "gpuCount", "bidPerGpu", "cloudType", "containerDiskInGb", "volumeInGb",
        "ports", "dockerArgs", "env", "dataCenterId", "startSsh",
    }  # fmt: skip
    _check_fields(order, known, "PodRentInterruptableInput")
    body: dict[str, Any] = {
        "name": order["name"], "image": order["imageName"], "cloud": order["cloudType"],
        "ports": order["ports"].split(","), "gpu": {"id": order["gpuTypeId"], "count": int(order["gpuCount"])},
        "disk": int(order["containerDiskInGb"]),
        "args": order.get("dockerArgs", ""), "env": {pair["key"]: pair["value"] for pair in order.get("env", [])},
    }  # fmt: skip
    if order.get("minCudaVersion"):
        body["gpu"]["minCudaVersion"] = order["minCudaVersion"]
    if order.get("dataCenterId"):
        body["dataCenterIds"] = [order["dataCenterId"]]
    try:
        pod = world.create(body, bid=order["bidPerGpu"])
    except Problem as problem:
        raise QueryError(problem.detail) from problem
    return {
        "id": pod.id, "name": body["name"], "imageName": body["image"], "costPerHr": float(pod.rate),
        "machineId": "m1", "desiredStatus": "RUNNING", "env": body["env"],
    }  # fmt: skip


def _terminate(identifier: str, world: World, own_pod: str | None) -> None:
    if own_pod not in (None, identifier):
        raise QueryError("You do not have permission to perform this action.")
    try:
        world.delete(identifier)
    except Problem as problem:
        raise QueryError(problem.detail) from problem
