"""``python -m specdec_kernels [--json]``: what was built, what is usable here, and why the rest is not."""

import argparse
import json

from . import diagnostics


def main():
    parser = argparse.ArgumentParser(prog="python -m specdec_kernels", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args().json
    facts = diagnostics.report()
    print(json.dumps(facts, indent=2) if as_json else diagnostics.text(facts))


if __name__ == "__main__":
    main()
