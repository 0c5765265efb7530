"""Tests that a child process gets only allow-listed variables, because the environment has the clouds' keys."""

from __future__ import annotations

import ast
import re

from house_sources import sources

# The supervisor, and each verb that the MCP server starts, is gpurun itself and needs its keys. On a rented machine the
# script of --setup and the profile of a login get a login's whole environment.
WHOLE = (
    "gpurun/cli/agent_tools.py",
    "gpurun/lifecycle/supervisor.py",
    "gpurun/remote/agent/login_environment.py",
    "gpurun/remote/agent/setup_process.py",
)
STARTS = re.compile(r"subprocess\.(run|Popen|call|check_\w+)|os\.execve")
# The three of platform run `uname -p`. os.execve is not here, because its last argument is the environment.
HIDES_IT = re.compile(
    r"platform\.(platform|processor|uname)|os\.(system|popen|exec(?!ve\b)\w+|spawn\w+|posix_spawn\w*)|pty\.spawn"
    r"|subprocess\.get\w+"
)


def test_a_child_process_has_the_environment_of_the_allow_list() -> None:
    wrong, whole = [], set()
    for source in sources("gpurun"):
        for call in (node for node in ast.walk(source.tree) if isinstance(node, ast.Call)):
            given = next((ast.unparse(word.value) for word in call.keywords if word.arg == "env"), "")
            if ast.unparse(call.func) == "os.execve":
                given = ast.unparse(call.args[2])
            if HIDES_IT.fullmatch(ast.unparse(call.func)):
                wrong.append(source.at(call))
            elif STARTS.fullmatch(ast.unparse(call.func)) and not re.match(r"\w*environment\(", given):
                if source.path in WHOLE and "os.environ" in given:
                    whole.add(source.path)
                else:
                    wrong.append(source.at(call))
    assert not wrong, "\n".join(wrong)
    assert whole == set(WHOLE)
