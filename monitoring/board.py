#!/usr/bin/env python3
"""Writes board.json, a board for Grafana."""

import json
import pathlib

# Title, unit, kind of panel, and queries with what they are called.
PANELS = [
    ("Lag: age of the oldest expired row", "s", "timeseries", [("pg_ttl_index_rule_lag_seconds", "{{table_name}} {{column_name}} {{rule_name}}")]),
    ("Rows removed per second", "rowsps", "timeseries", [("pg_ttl_index:removed_rows:rate5m", "{{table_name}}")]),
    ("Rows that cannot be removed", "short", "timeseries", [
        ("pg_ttl_index_rule_blocked_rows > 0", "{{table_name}} blocked"),
        ("pg_ttl_index_rule_locked_rows > 0", "{{table_name}} locked"),
    ]),
    ("Backlog of sweeps in progress", "short", "timeseries", [("pg_ttl_index_rule_backlog_rows", "{{table_name}}")]),
    ("Rules by state", "short", "timeseries", [("count by (state) (pg_ttl_index_rule_state_info)", "{{state}}")]),
    ("Failures in a row", "short", "timeseries", [("pg_ttl_index_rule_consecutive_failures > 0", "{{table_name}}")]),
    ("Processes that sweep", "short", "timeseries", [("pg_ttl_index_database_workers", "{{datname}}")]),
    ("Time since the last success", "s", "timeseries", [("pg_ttl_index_rule_since_success_seconds", "{{table_name}}")]),
    ("Partitions removed", "short", "timeseries", [("increase(pg_ttl_index_rule_removed_partitions[1d])", "{{table_name}}")]),
    ("What rules wait for", "short", "table", [('pg_ttl_index_rule_state_info{state!="active"} or pg_ttl_index_rule_state_info{hold!=""}', "")]),
]

SOURCE = {"type": "prometheus", "uid": "${source}"}


def panel(number, title, unit, kind, queries):
    return {
        "id": number + 1,
        "title": title,
        "type": kind,
        "datasource": SOURCE,
        "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": SOURCE,
                "expr": query,
                "legendFormat": legend,
                "instant": kind == "table",
                "format": "table" if kind == "table" else "time_series",
            }
            for place, (query, legend) in enumerate(queries)
        ],
    }


board = {
    "uid": "pg-ttl-index",
    "title": "pg_ttl_index",
    "tags": ["postgresql"],
    "schemaVersion": 36,
    "refresh": "1m",
    "time": {"from": "now-6h", "to": "now"},
    "templating": {"list": [{"name": "source", "label": "Source", "type": "datasource", "query": "prometheus"}]},
    "panels": [panel(number, *parts) for number, parts in enumerate(PANELS)],
}
target = pathlib.Path(__file__).with_name("board.json")
target.write_text(json.dumps(board, indent=1) + "\n")
