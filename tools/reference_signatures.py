"""Makes python/tests/reference_signatures.json of the reference API's page: names, parameters, defaults and return types, no sentences.

    python tools/reference_signatures.py PAGE > python/tests/reference_signatures.json
"""

import ast
import json
import re
import sys

PUBLIC = ("__enter__", "__exit__", "__iter__", "__next__", "__call__")  # and whatever begins with no underscore
MODULE = r"nemo_automodel\.(?:[a-z_]\w*\.)*"


def signature(block: str) -> tuple[str, dict]:
    kind, text = ("class", block[len("class "):]) if block.startswith("class ") else ("function", block)
    name, rest = re.match(rf"{MODULE}([\w.]+)(.*)", text, re.S).groups()
    if not rest:
        return name, {"kind": "enum"}
    function = ast.parse("def f" + rest + ": pass").body[0]
    a = function.args
    assert not (a.posonlyargs or a.kwonlyargs or a.vararg or a.kwarg), name
    defaults = [None] * (len(a.args) - len(a.defaults)) + a.defaults
    entry = {"kind": kind, "parameters": [[p.arg] if d is None else [p.arg, ast.unparse(d)] for p, d in zip(a.args, defaults, strict=True)]}
    if function.returns is not None:
        entry["returns"] = re.sub(MODULE + "|torch\\.(?=Tensor)|'", "", ast.unparse(function.returns))
    return name, entry


def main() -> None:
    page = open(sys.argv[1], encoding="utf-8").read()
    table = dict(signature(block.strip()) for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S))
    table = {name: entry for name, entry in table.items() if (last := name.split(".")[-1])[0] != "_" or last in PUBLIC}
    table["FeatureAlgorithm"]["members"] = dict(re.findall(r"^\*\*`([A-Z0-9]+)`\*\* `= '(\w+)'`", page, re.M))
    owner = ""
    for found, attribute in re.findall(rf"^class {MODULE}(\w+)|^\*\*`(is_closed|store_uri)`\*\* `\w+`$", page, re.M):
        owner = found or owner
        if attribute and [attribute] not in table[owner]["parameters"]:
            table[f"{owner}.{attribute}"] = {"kind": "attribute"}
    json.dump(dict(sorted(table.items())), sys.stdout, indent=1)
    print()


main()
