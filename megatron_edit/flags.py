"""Names, values and presets of flags, as written on the command line."""

from __future__ import annotations

import dataclasses
import re
from ipaddress import IPv6Address
from typing import Any

from megatron_edit.constants import ADAM, AUTO
from megatron_edit.errors import UsageError
from megatron_edit.method.strategy import STRATEGIES

UNSET = "not set"  # in the place of a default
_HOST_NAME = re.compile(r"[\w.-]+")
USE_EDIT, PREFIX = "--use-edit", "--edit-"
FLAG_PREFIXES = (USE_EDIT, PREFIX)
# With those of misspelt flags: underscores instead of dashes.
RESERVED_PREFIXES = (*FLAG_PREFIXES, *("--" + b[2:].replace("-", "_") for b in FLAG_PREFIXES))


def flag(name: str) -> str:
    """Return the command-line flag of a field of `EditConfig`."""
    return USE_EDIT if name == "use_edit" else PREFIX + name.replace("_", "-")


def flag_of(argument: str) -> str:
    """Return Megatron's flag for one of its arguments."""
    return "--" + argument.replace("_", "-")


def attribute(name: str) -> str:
    """Return the name of argparse's attribute for a field of `EditConfig`."""
    return flag(name)[2:].replace("-", "_")


def format_value(value: Any, none: str = AUTO) -> str:
    """Return a value as written on the command line, `none` for None."""
    return none if value is None else str(value)


def preset_of(spec: dataclasses.Field[Any], strategy: str, inner_optimizer: str) -> Any:
    """Return the value of a setting whose flag is not given.

    Args:
        spec: field of `EditConfig`.
        strategy: name of the strategy, which may have a preset.
        inner_optimizer: Megatron's `--optimizer`; some strategies have presets for it.
    """
    if "usual" not in spec.metadata:
        return spec.default
    return STRATEGIES[strategy].presets_with(inner_optimizer).get(spec.name, spec.metadata["usual"])


def default_text(spec: dataclasses.Field[Any]) -> str:
    """Describe the default of a setting, and the presets of strategies and inner optimizers."""
    if "usual" not in spec.metadata:
        unset = AUTO if AUTO in spec.metadata["doc"] else UNSET
        return format_value(spec.default, none=spec.metadata["none"] or unset)
    usual = preset_of(spec, "edit", ADAM)
    others = [
        f"{strategy.name} {strategy.presets[spec.name]}"
        for strategy in STRATEGIES.values()
        if strategy.presets.get(spec.name, usual) != usual
    ]
    by_optimizer: dict[str, list[str]] = {}
    for strategy in STRATEGIES.values():
        for optimizer, presets in strategy.optimizer_presets.items():
            if spec.name in presets:
                text = f"with --optimizer {optimizer} {presets[spec.name]}"
                by_optimizer.setdefault(text, []).append(strategy.name)
    others += [f"{' and '.join(names)} {text}" for text, names in by_optimizer.items()]
    return "; ".join([format_value(usual), *others])


def parse_endpoint(text: str, name: str = "HOST:PORT", *, least_port: int = 1) -> tuple[str, int]:
    """Split ``HOST:PORT`` into host and port.

    Args:
        text: a host name, an IPv4 address or an IPv6 address, which may be in brackets; a port.
        least_port: 0 where the kernel may choose one.

    Raises:
        UsageError: the text has another form.
    """
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        is_host = _is_ipv6(host)
    else:
        is_host = _HOST_NAME.fullmatch(host) is not None or _is_ipv6(host)
    if (
        is_host
        and port.isascii()
        and port.isdecimal()
        and len(port) < 6
        and least_port <= int(port) < 65536
    ):
        return host, int(port)
    raise UsageError(
        f"{name} {text}",
        f"must be HOST:PORT, with the name or address of a host and a port from {least_port} to "
        "65535",
        "give e.g. node0:29400, 10.0.0.1:29400 or [fd00::1]:29400",
    )


def endpoint_text(host: str, port: int) -> str:
    """Return what `parse_endpoint` splits."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_ipv6(host: str) -> bool:
    try:
        IPv6Address(host)
    except ValueError:
        return False
    return True
