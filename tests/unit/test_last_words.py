"""Tests that a failed command is reported with the line that names the error, not with the lines below it."""

from __future__ import annotations

import pytest

from gpurun.remote.agent.runner.last_words import LAST_LINES, LastWords

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
TORCHRUN = """\
E1127 03:00:00.000000 123 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) local_rank: 0
Traceback (most recent call last):
  File "/usr/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-27_03:00:00
  exitcode  : 1 (pid: 17)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""


def words_of(text: str) -> str:
    words = LastWords()
    for line in text.splitlines():
        words.take(line)
    return words.text


TRACEBACK = "Traceback (most recent call last):\n  File 't.py', line 5\n    main()\n"
RANKS = "".join(f"[rank1]: {line}\n" for line in (TRACEBACK + OOM).splitlines())
CHAINED = f"{TRACEBACK}KeyError: 'a'\n\nDuring handling of the above, another occurred:\n\n{TRACEBACK}ValueError: b"
AT_EXIT = f"ModuleNotFoundError: No module named 'tiktoken'\nException ignored in: <f>\n{TRACEBACK}TypeError: None"
NCCL = "gpu0:1:2 [0] NCCL WARN Connect to 10.0.0.1 failed : timed out"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        pytest.param(f"step 1\n{TRACEBACK}{OOM}\n{TORCHRUN}", OOM, id="torchrun's table is below it"),
        pytest.param(RANKS + TORCHRUN, OOM, id="of a rank"),
        pytest.param(f"{TRACEBACK}lab.NoData: no shard", "lab.NoData: no shard", id="an exception of any name"),
        pytest.param(CHAINED, "ValueError: b", id="the last of two"),
        pytest.param(AT_EXIT, "ModuleNotFoundError: No module named 'tiktoken'", id="not what is said at exit"),
        pytest.param("run.sh: 3: tqdm: command not found\nend", "run.sh: 3: tqdm: command not found", id="a shell"),
        pytest.param(f"{NCCL}\nbye", NCCL, id="NCCL"),
        pytest.param("t.py: error: argument --lr\nval error: 0.25", "t.py: error: argument --lr", id="argparse"),
        pytest.param(TORCHRUN, "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:", id="a launcher"),
        pytest.param("no data here\n======\n", "no data here", id="no error is named"),
        pytest.param("error: old\n" + "step\n" * LAST_LINES + "stop", "stop", id="an error of long ago"),
        pytest.param("", "", id="silence"),
    ],
)
def test_the_line_that_names_the_error_is_told(text: str, found: str) -> None:
    assert words_of(text) == found
