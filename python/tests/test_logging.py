"""What is logged is text: a handler may keep its records for as long as it likes."""

from __future__ import annotations

import ast
from pathlib import Path

import sluice

SOURCES = sorted(Path(sluice.__file__).parent.rglob("*.py"))
CALLS = {f"{name}.{level}" for name in ("log", "_log") for level in ("debug", "info", "warning", "error", "exception")}


def errors_logged(source: str) -> list[int]:
    """The lines on which a log call is handed an exception: its traceback would keep the frames it went through, and with them tensors and loaders, for as long as a record lives."""
    found = []

    def visit(node: ast.AST, errors: frozenset[str]) -> None:
        if isinstance(node, ast.FunctionDef):
            errors |= {a.arg for a in node.args.args if a.annotation is not None and any(word in ast.unparse(a.annotation) for word in ("Error", "Exception"))}
        if isinstance(node, ast.ExceptHandler) and node.name:
            errors |= {node.name}
        if isinstance(node, ast.Call) and ast.unparse(node.func) in CALLS:
            found.extend(a.lineno for a in node.args if isinstance(a, ast.Name) and a.id in errors or isinstance(a, ast.Attribute) and a.attr.strip("_") in ("error", "cause", "fatal"))
        for child in ast.iter_child_nodes(node):
            visit(child, errors)

    visit(ast.parse(source), frozenset())
    return found


def test_it_finds_an_error_that_is_logged() -> None:
    assert errors_logged("try:\n    f()\nexcept E as e:\n    log.info('%s', e)\n    log.info('%s', str(e))\n") == [4]
    assert errors_logged("log.info('%s %s', self._error, self.error_count)\n") == [1]
    assert errors_logged("def f(a: int, error: StaleError):\n    log.warning('%d %s', a, error)\n") == [2]


def test_no_log_record_keeps_an_error() -> None:
    assert len(SOURCES) > 20
    assert {p.name: lines for p in SOURCES if (lines := errors_logged(p.read_text()))} == {}
