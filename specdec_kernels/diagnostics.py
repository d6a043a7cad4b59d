"""What this installation can do here, and why it can't do the rest: ``python -m specdec_kernels [--json]``."""

import os
import platform

import torch

from . import __version__, native, registry


def report():
    """Everything that ``python -m specdec_kernels --json`` prints, as plain dicts and lists."""
    return {
        "versions": _versions(),
        "environment": {name: text for name, text in sorted(os.environ.items()) if name.startswith("SPECDEC_")},
        "cpu": _cpu(),
        "backends": {name: _backend(name, status) for name, status in registry.backends().items()},
        "operations": {op: {device: _serving(op, device) for device in registry.ORDER} for op in registry.OPERATIONS},
    }


def _versions():
    versions = {"specdec_kernels": __version__, "torch": torch.__version__, "python": platform.python_version()}
    versions["platform"] = f"{platform.system()} {platform.machine()}"
    return versions


def _cpu():
    facts = {"threads": native.threads()}
    if native.cpu is not None:
        facts |= {"isa": native.cpu.isa(), "machine_isa": native.cpu.machine_isa()}
    return facts


def _backend(name, status):
    built, reasons = registry.build_info()
    module = registry.COMPILED.get(name)
    facts = {"built": status["built"], "usable": status["usable"]}
    facts["reason"] = status["reason"]
    facts["operations"] = status["operations"]
    if module in built:
        facts["build"] = built[module]
    elif module in reasons:
        facts["build_log"] = reasons[module]
    return facts


def _serving(operation, device):
    """The backend that serves the operation's calls on that device, and why the others don't."""
    try:
        serves = registry.candidates(operation, device)[0][0]
    except registry.BackendUnavailable as error:
        return {"serves": None, "reason": str(error)}
    others = {}
    for name in registry.ORDER[device]:
        loaded, reason = registry.module(name)
        if not hasattr(loaded, operation):
            others[name] = reason or f"has no {operation}"
        elif name != serves:
            others[name] = f"comes after {serves}"
    return {"serves": serves, "others": others}


def text(facts):
    """The report for people."""
    versions, cpu = facts["versions"], facts["cpu"]
    lines = [f"specdec_kernels {versions['specdec_kernels']}, torch {versions['torch']}, "]
    lines[0] += f"Python {versions['python']}, {versions['platform']}"
    for name, value in facts["environment"].items():
        lines.append(f"{name}={value}")
    lines += ["", _row("backend", "built", "usable")]
    for name, backend in facts["backends"].items():
        built, usable = ("yes" if backend[fact] else "no" for fact in ("built", "usable"))
        lines.append(_row(name, built, usable, _remark(name, backend, cpu)))
    lines += ["", _row("operation", *(f"{device} tensors" for device in registry.ORDER), widths=(26, 16))]
    for operation, devices in facts["operations"].items():
        served = [serving["serves"] or "nothing" for serving in devices.values()]
        lines.append(_row(operation, *served, widths=(26, 16)))
    gaps = _gaps(facts)
    if gaps:
        lines += [
            "",
            "Not on the fastest usable backend:",
            *(f"  {why}: {', '.join(ops)}" for why, ops in gaps.items()),
        ]
    return "\n".join(lines)


def _row(*cells, widths=(12, 8)):
    first, rest = widths
    return (f"{cells[0]:{first}}" + "".join(f"{cell:{rest}}" for cell in cells[1:])).rstrip()


def _remark(name, backend, cpu):
    if backend["reason"]:
        return backend["reason"].replace("\n", "\n" + " " * 28)
    if name == "reference":
        return "pure PyTorch"
    if name == "triton":
        return "each kernel is compiled in the first call that needs it"
    build = backend.get("build", {})
    if name == "cpu":
        sets = f"{cpu['isa']} (the machine has {cpu['machine_isa']}), {cpu['threads']} threads"
        return f"{sets}; {build.get('compiler', '')}"
    return f"{build.get('toolkit', '')} for {' '.join(build.get('archs', []))}"


def _gaps(facts):
    """Reason -> the operations that a usable, faster backend does not serve."""
    gaps = {}
    for operation, devices in facts["operations"].items():
        for device, serving in devices.items():
            reasons = [serving["reason"]] if serving["serves"] is None else []
            for name, why in serving.get("others", {}).items():
                if facts["backends"][name]["usable"] and why.startswith("has no"):
                    reasons.append(f"{name} lacks, for {device} tensors")
            for reason in reasons:
                gaps.setdefault(reason.removeprefix(f"{operation}: "), {})[operation] = None
    return gaps
