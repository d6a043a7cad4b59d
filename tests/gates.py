"""Compile gates: every GPU kernel compiles, spills nothing, and needs what a committed table says. No GPU needed.

    python tests/gates.py                                   # one NVIDIA and one AMD target per compiler
    python tests/gates.py --all                             # every target
    python tests/gates.py --nvcc sm_75,sm_80                # these and no others
    python tests/gates.py --write                           # every target, and the table data/resources.csv anew

Exit code 1 if something does not compile, spills, or is not as in the table (resource_table.py); so does a compiler
that is not installed, unless --allow-missing is given.
"""

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import resource_table
from gpu_compilers import COMPILERS, setup_native


def chosen(options):
    """[(compiler, targets)] of the compilers that are installed, and the errors about the others."""
    found, errors = [], []
    asked = {compiler.name: getattr(options, compiler.name) for compiler in COMPILERS}
    for compiler in COMPILERS:
        if asked[compiler.name] is not None or any(asked.values()):
            targets = tuple(filter(None, (asked[compiler.name] or "").split(",")))
        else:
            targets = compiler.targets if options.all or options.write else compiler.default
        if targets and not compiler.installed():
            text = f"{compiler.name}: not checked, it is not installed"
            print(text) if options.allow_missing else errors.append(text)
        elif targets:
            found.append((compiler, targets))
    return found, errors


def compile_all(found):
    """Runs the compilers side by side: (kernels, errors, {(compiler, target): seconds of compiling})."""
    jobs = [(c, target, source) for c, targets in found for target in targets for source in c.sources()]
    kernels, errors, seconds = [], [], {}

    def work(job):
        begin = time.monotonic()
        return *job[0].compile(*job[1:]), time.monotonic() - begin

    with ThreadPoolExecutor(setup_native().job_limit()) as pool:
        for (compiler, target, _), (more, wrong, spent) in zip(jobs, pool.map(work, jobs), strict=True):
            kernels += more
            errors += wrong
            seconds[compiler.name, target] = seconds.get((compiler.name, target), 0) + spent
    compiled = {(k.compiler, k.target) for k in kernels}
    errors += [f"{' '.join(place)}: the compiler named no kernel" for place in seconds if place not in compiled]
    return sorted(kernels), errors, seconds


def update(table, kernels):
    """The table with the rows of every (compiler, target) that was compiled replaced."""
    compiled = {(k.compiler, k.target) for k in kernels}
    return [k for k in table if (k.compiler, k.target) not in compiled] + kernels


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for compiler in COMPILERS:
        known, default = ", ".join(compiler.targets), ",".join(compiler.default)
        parser.add_argument(f"--{compiler.name}", metavar="LIST", help=f"some of {known} (without any list: {default})")
    parser.add_argument("--all", action="store_true", help="every target of every compiler")
    parser.add_argument(
        "--write", action="store_true", help="write the table instead of comparing; without lists of everything"
    )
    parser.add_argument("--allow-missing", action="store_true", help="a compiler that is not installed is no failure")
    return parser.parse_args(arguments)


def main(arguments=None):
    options, begin = parse(arguments), time.monotonic()
    found, missing = chosen(options)
    kernels, errors, seconds = compile_all(found)
    table = resource_table.read()
    wrong, remarks = resource_table.compare(kernels, [] if options.write else table)
    print(f"{'compiler':9}{'target':8}{'registers':>10}{'shared':>8}{'spilled':>9}  kernel")
    for k in kernels:
        print(f"{k.compiler:9}{k.target:8}{k.registers:10}{k.shared:8}{k.spilled:9}  {k.name}")
    for (name, target), spent in seconds.items():
        print(f"{name} {target}: {spent:.1f} s")
    print(f"{len(kernels)} kernels in {time.monotonic() - begin:.1f} s")
    errors = [*missing, *errors, *wrong]
    if options.write and not errors:
        resource_table.write(update(table, kernels))
        print(f"wrote {resource_table.PATH}")
    elif not options.write:
        print("\n".join(remarks))
    for error in errors:
        print(error, file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
