"""Tests that a quoted provider error keeps its words and drops the HTML of a proxy's error page."""

from __future__ import annotations

import json

from gpurun.providers._http import Answer
from gpurun.providers.lambdalabs import parse as lambdalabs
from gpurun.providers.runpod import parse as runpod
from tests.refusals import lacking

PAGE = "<!DOCTYPE html><html><head><title>502</title></head>\n<body class='x'><h1>Bad <b>Gateway</b></h1></body></html>"


def test_a_page_in_an_error_is_told_in_its_words_alone() -> None:
    ours = {"error": {"code": "global/x", "message": PAGE}}
    assert lambdalabs.describe_lambda_error(Answer(502, {}, json.dumps(ours))) == "HTTP 502: global/x: 502 Bad Gateway"
    assert runpod.describe_runpod_error(Answer(502, {}, json.dumps({"detail": PAGE}))) == "HTTP 502: 502 Bad Gateway"
    for words_of in (lambdalabs.describe_lambda_error, runpod.describe_runpod_error):
        assert lacking(words_of(Answer(502, {}, PAGE)), "HTTP 502") == []
        assert "Gateway" not in words_of(Answer(502, {}, PAGE))


def test_what_only_looks_like_a_tag_stays() -> None:
    assert runpod.describe_runpod_error(Answer(400, {}, json.dumps({"detail": "needs 1 < 2 GPUs and > 0"}))).endswith(
        "1 < 2 GPUs and > 0"
    )
