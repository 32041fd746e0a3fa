"""The command on two runs: diff."""

from __future__ import annotations

import argparse
import json

from gradrewrite.cli.messages import Refused, reading
from gradrewrite.diagnostics.first_difference import compare_logs
from gradrewrite.diagnostics.run_file import read_jsonl


def diff(options: argparse.Namespace) -> int:
    """Print the first difference between two logs; return 0 if they are equal, else 1."""
    a, b = reading(lambda: (read_jsonl(options.a), read_jsonl(options.b)))
    names = str(options.a), str(options.b)
    found = reading(lambda: compare_logs(a, b, tolerance=options.tolerance, sites=options.sites, names=names))
    print(json.dumps(found.to_json(), indent=1, allow_nan=False) if options.json else found)
    if options.html is not None:
        try:
            found.render(options.html)
        except OSError as err:
            raise Refused(f"cannot write {options.html}: {err.strerror}; choose another path with --html") from err
    return 0 if found.is_equal else 1
