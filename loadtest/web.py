"""A tab "Tokens" in locust's web UI, through its own means: a table, two downloads, and a page of charts beside them.

Locust draws its own charts in its script, which takes no further ones: ours are a page of its web server, which the tab
of downloads leads to.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flask import Response, request

from loadtest import report
from loadtest.figures import Board
from loadtest.history import History

_TAB = "tokens"
_SHOWN = {
    "name": "Name",
    "requests": "# Requests",
    "failures": "# Fails",
    "output_tokens_per_second": "Output tokens/s",
    "ttft_p50": "TTFT p50 (ms)",
    "ttft_p99": "TTFT p99 (ms)",
    "itl_p50": "ITL p50 (ms)",
    "itl_p99": "ITL p99 (ms)",
    "tpot_p50": "TPOT p50 (ms)",
    "queue_p99": "Queue p99 (ms)",
    "e2e_p99": "E2E p99 (ms)",
    "lag_p99": "Generator lag p99 (ms)",
}


def _rows(board: Board) -> list[dict[str, Any]]:
    def value(key: str, number: Any) -> Any:
        if number is None:
            return "–"
        if not isinstance(number, float):
            return number
        return round(number, 1) if key.endswith("per_second") else round(number * 1000, 2)

    flat = (report.flat(name, row) for name, row in board.rows().items())
    return [{key: value(key, row[key]) for key in _SHOWN} for row in flat]


def add_tab(web_ui: Any, board: Board, history: History) -> None:
    """Extend locust's ``WebUI``. Its page reads tabs and tables from the template arguments and their rows from
    ``/stats/requests``; its script turns ``snake_case`` keys into ``camelCase`` on both sides."""
    web_ui.template_args["extended_tabs"] = [{"title": "Tokens", "key": _TAB}]
    columns = [{"key": key, "title": title} for key, title in _SHOWN.items()]
    web_ui.template_args["extended_tables"] = [{"key": _TAB, "structure": columns}]
    web_ui.template_args["extended_csv_files"] = [
        {"href": "./tokens/csv", "title": "Download token statistics CSV"},
        {"href": "./tokens/json", "title": "Download token statistics JSON"},
        {"href": "./tokens/charts", "title": "Charts of tokens over time"},
    ]

    @web_ui.app.after_request
    def add_rows(response: Response) -> Response:
        if request.path.endswith("/stats/requests") and response.is_json and isinstance(response.json, dict):
            response.set_data(json.dumps({**response.json, "extended_stats": [{"key": _TAB, "data": _rows(board)}]}))
        return response

    @web_ui.app.route("/tokens/csv")
    @web_ui.auth_required_if_enabled
    def tokens_csv() -> Response:
        disposition = {"Content-Disposition": "attachment; filename=tokens.csv"}
        return Response(report.to_csv(board.rows()), mimetype="text/csv", headers=disposition)

    @web_ui.app.route("/tokens/json")
    @web_ui.auth_required_if_enabled
    def tokens_json() -> Response:
        return Response(report.to_json(board.rows(), {}), mimetype="application/json")

    @web_ui.app.route("/tokens/charts")
    @web_ui.auth_required_if_enabled
    def tokens_charts() -> Response:
        return Response(Path(__file__).with_name("charts.html").read_text("utf-8"), mimetype="text/html")

    @web_ui.app.route("/tokens/history")
    @web_ui.auth_required_if_enabled
    def tokens_history() -> Response:
        return Response(json.dumps(history.points), mimetype="application/json")
