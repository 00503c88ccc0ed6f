"""What a client may ask next with the ids that an answer names: OpenAPI's links, by operation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

ID: Final = "$response.body#/id"
JOB: Final = "$response.body#/giornata/job_id"
FIRST: Final = "$response.body#/data/0/id"

_JOB: Final = ("getJob", "followJob", "getImage", "cancelJob")
_TEMPLATE: Final = ("getTemplate", "deleteTemplate")
_LORA: Final = ("getLora", "pinLora", "unpinLora", "deleteLora")

FOLLOWED: Final[Mapping[str, tuple[str, str, tuple[str, ...]]]] = {
    "edit": ("job_id", JOB, _JOB[:3]),
    "generate": ("job_id", JOB, _JOB[:3]),
    "createJob": ("job_id", ID, _JOB),
    "getJob": ("job_id", ID, _JOB),
    "cancelJob": ("job_id", ID, _JOB[:3]),
    "registerTemplate": ("template_id", ID, _TEMPLATE),
    "listTemplates": ("template_id", FIRST, _TEMPLATE),
    "getTemplate": ("template_id", ID, _TEMPLATE),
    "uploadLora": ("lora_id", ID, _LORA),
    "listLoras": ("lora_id", FIRST, _LORA),
    "getLora": ("lora_id", ID, _LORA),
    "pinLora": ("lora_id", ID, _LORA),
    "unpinLora": ("lora_id", ID, _LORA),
    "listModels": ("model", FIRST, ("getModel",)),
    "listWebhooks": ("job_id", FIRST, ("retryWebhook", "deleteWebhook", "getJob")),
    "retryWebhook": ("job_id", ID, ("deleteWebhook", "getJob")),
}
"""By operation: which parameter, what it is, and the operations that take it."""


def links_of(operation: str) -> dict[str, Any]:
    """The links of an operation's good answer, by name; empty where nothing follows."""
    if operation not in FOLLOWED:
        return {}
    parameter, expression, followers = FOLLOWED[operation]
    return {name: {"operationId": name, "parameters": {parameter: expression}} for name in followers}
