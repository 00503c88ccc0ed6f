"""Write the page of all settings: ``python -m deploy.settings > docs/settings.md``."""

from __future__ import annotations

from enum import Enum
from typing import Any, Final, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from giornata.config import ENV_PREFIX, ServiceConfig
from giornata_controlnet.config import ControlNetConfig
from giornata_denoiser.config import DenoiserConfig
from giornata_gateway.config import GatewayConfig
from giornata_lora_store.config import LoraStoreConfig
from giornata_prepost.config import PrepostConfig
from giornata_router.config import RouterConfig

SERVICES: Final[dict[str, type[ServiceConfig]]] = {
    "gateway": GatewayConfig,
    "router": RouterConfig,
    "prepost": PrepostConfig,
    "denoiser": DenoiserConfig,
    "controlnet": ControlNetConfig,
    "lora-store": LoraStoreConfig,
}
HEAD: Final = """# Which settings are there?

Each is an environment variable of the services named above it, and a flag of their programs (`--nats-url` for
`GIORNATA_NATS_URL`), which wins. A service does not start with a mistake in any of them. What is not listed is fixed,
and a service does not start with a variable of that name either. This page is generated: `python -m deploy.settings`.
"""


def page() -> str:
    """The page as Markdown: a table for each set of services that share settings, those of most services first."""
    users: dict[tuple[str, str], list[str]] = {}
    fields: dict[tuple[str, str], FieldInfo] = {}
    for service, config in SERVICES.items():
        for name, field in config.model_fields.items():
            setting = (name, str(field.description))
            users.setdefault(setting, []).append(service)
            fields.setdefault(setting, field)
    tables: dict[tuple[str, ...], list[str]] = {}
    for setting, services in users.items():
        tables.setdefault(tuple(services), []).append(_row(setting[0], fields[setting]))
    texts = [HEAD]
    for services_of, rows in sorted(tables.items(), key=lambda item: -len(item[0])):
        title = "All services" if len(services_of) == len(SERVICES) else ", ".join(services_of).capitalize()
        texts.append(
            "\n".join(
                [
                    f"## {title}\n",
                    "| variable | type | default | what it is, and when to change it |",
                    "|---|---|---|---|",
                    *rows,
                    "",
                ]
            )
        )
    return "\n".join(texts)


def _row(name: str, field: FieldInfo) -> str:
    default = field.get_default()
    shown = "" if default is None or default == "" or field.default_factory else f"`{_plain(default)}`"
    if field.is_required():
        shown = "needed"
    meaning = str(field.description).replace("|", "\\|")
    return f"| `{ENV_PREFIX}{name.upper()}` | {_type(field.annotation)} | {shown} | {meaning} |"


def _plain(value: Any) -> str:
    return (
        str(value.value if isinstance(value, Enum) else value)
        .replace("True", "true")
        .replace("False", "false")
    )


def _type(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    if arguments := [one for one in get_args(annotation) if one is not type(None)]:
        return _type(arguments[0])
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ", ".join(f"`{choice.value}`" for choice in annotation)
    names = {
        "str": "text",
        "int": "whole number",
        "float": "number",
        "bool": "`true`, `false`",
        "Path": "path",
    }
    return names[annotation.__name__]


if __name__ == "__main__":
    print(page(), end="")
