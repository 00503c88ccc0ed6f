"""The nodes for ComfyUI, loaded by their folder's path as ComfyUI loads them."""

from __future__ import annotations

import sys
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any, Final

FOLDER: Final = Path(__file__).parents[1] / "deploy" / "comfyui"
NAME: Final = str(FOLDER).replace(".", "_x_")
"""What ComfyUI calls the package."""


def load() -> ModuleType:
    """The package, the same at every call."""
    if NAME not in sys.modules:
        spec = util.spec_from_file_location(
            NAME, FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules[NAME] = util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[NAME])
    return sys.modules[NAME]


def run(name: str, **inputs: Any) -> Any:
    """The output of a node, as ComfyUI asks for it: by keyword, and one for each of RETURN_TYPES."""
    node = load().NODE_CLASS_MAPPINGS[name]()
    outputs = getattr(node, node.FUNCTION)(**inputs)
    assert isinstance(outputs, tuple)
    assert len(outputs) == len(node.RETURN_TYPES)
    return outputs[0]
