# SPDX-License-Identifier: Apache-2.0
"""Writes golden figures anew: `python -m tests.golden.regenerate --reason "..."`.

Only where a change was meant to change numbers; the reason goes into the file, and
belongs into the commit's message too.
"""

import argparse
import json

from tests import conftest  # noqa: F401  (8 CPU devices)
from tests.test_golden import GOLDEN, figures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--reason", required=True, help="why the numbers change")
    reason = parser.parse_args().reason
    text = json.dumps({"reason": reason, "figures": figures()}, indent=1)
    GOLDEN.write_text(text + "\n", "utf-8")
    print(f"wrote {GOLDEN}")


if __name__ == "__main__":
    main()
