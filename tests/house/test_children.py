"""A program that inherits the whole environment has the keys of the clouds: a child gets what the allow-list names."""

from __future__ import annotations

import ast
import re

from house_sources import sources

# The supervisor is gpurun again and needs its keys, and so is each verb that an agent's server starts; the script of
# --setup and a login's profile have a login's, on the machine of their user.
WHOLE = (
    "gpurun/cli/agent_tools.py",
    "gpurun/lifecycle/supervisor.py",
    "gpurun/remote/agent/login_environment.py",
    "gpurun/remote/agent/setup_process.py",
)
STARTS = re.compile(r"subprocess\.(run|Popen|call|check_\w+)|os\.execve")
# platform's three ask `uname -p`; an execve shows it as its last argument.
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
